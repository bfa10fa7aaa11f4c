"""Sums over the ranks that hold shares of one model."""
