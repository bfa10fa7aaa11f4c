"""What the files of models and adapters say: configurations, names, digests. No torch."""
