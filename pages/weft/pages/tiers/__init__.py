"""Tiers: storage of pages in addition to the pool, in host memory or on disk."""
