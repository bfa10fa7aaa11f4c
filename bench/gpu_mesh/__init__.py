"""Engines in processes of their own, for benchmarks without services."""
