"""KV pages without requests, models or torch: what engines and KV stores share."""
