"""Schemes of quantised and plain weights, one file each."""
