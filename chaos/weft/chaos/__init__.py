"""Fault runs against a local mesh: `weft chaos`."""
