"""Where pages come from and go to: prefill workers, tiers, the KV store. No torch."""
