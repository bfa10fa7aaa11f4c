"""Steps on several ranks: rank 0 leads, all other ranks follow."""
