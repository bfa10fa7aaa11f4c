"""Steps on several ranks: rank 0 leads, the others follow."""
