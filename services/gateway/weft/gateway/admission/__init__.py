"""Who may run a request now: keys, tenants, rates, places and latency targets."""
