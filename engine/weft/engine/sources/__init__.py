"""The sources and receivers of pages: prefill workers, tiers, the KV store. No torch."""
