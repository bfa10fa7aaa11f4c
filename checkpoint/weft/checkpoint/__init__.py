"""What lies in a directory of a model or an adapter: configurations, names, digests. No torch."""
