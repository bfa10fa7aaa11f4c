"""Pages of the KV pool: reference counts, prefix tree, keys, eviction. Pure Python."""
