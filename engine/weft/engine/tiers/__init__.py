"""Where pages lie that the pool has no room for: host memory and local disk, one interface.

Nothing here needs torch: the KV store spills to the same disk tier.
"""
