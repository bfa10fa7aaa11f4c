"""Which adapters are on the device: loading, eviction, rows. Pure Python."""
