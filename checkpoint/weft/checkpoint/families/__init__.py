"""Readers of the configurations of model families, one file each: what their layers are made of."""
