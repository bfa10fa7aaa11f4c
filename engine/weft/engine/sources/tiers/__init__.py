"""Cache tiers below the pool, host memory and local disk, with one interface.

Nothing here needs torch: the KV store spills to the same disk tier.
"""
