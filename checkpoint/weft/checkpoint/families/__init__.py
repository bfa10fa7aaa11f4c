"""Readers of the configurations of model families, a file each: what their layers are made of."""
