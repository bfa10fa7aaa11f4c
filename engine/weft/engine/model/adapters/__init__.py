"""Reads adapters into rows of the device memory."""
