"""Architectures, one file each; they differ in how attention and MLPs are built."""
