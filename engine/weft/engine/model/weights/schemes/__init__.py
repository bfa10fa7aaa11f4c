"""Schemes: how checkpoints keep the weights of products, one file each."""
