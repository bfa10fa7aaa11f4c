"""Moves the bytes of pages: NIXL agents, staging, digests. Knows no leases and no requests."""
