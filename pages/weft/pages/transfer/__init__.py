"""Bytes of pages on their way: chunks, digests, NIXL, shipping."""
