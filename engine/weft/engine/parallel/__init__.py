"""Ranks of one engine: processes that hold shares of a model and run the same steps."""
