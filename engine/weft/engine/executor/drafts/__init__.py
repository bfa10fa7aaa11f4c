"""Drafts of heads on the device: chains and trees, eager and as graphs."""
