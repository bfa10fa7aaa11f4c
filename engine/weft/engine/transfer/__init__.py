"""Moves the bytes of pages: NIXL agents, staging, digests. It knows no lease and no request."""
