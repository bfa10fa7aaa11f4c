"""Simulated fleets: the gateway's own policies and page index over made-up workers."""
