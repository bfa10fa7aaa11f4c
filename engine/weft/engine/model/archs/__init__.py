"""Architectures, one file each. They differ in how attention and MLPs are built."""
