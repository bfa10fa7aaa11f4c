"""Drafts of heads on the device: chains and trees, with and without graphs."""
