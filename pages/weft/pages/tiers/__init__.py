"""Tiers: where pages are kept beside the pool, in host memory or on disk."""
