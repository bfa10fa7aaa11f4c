"""Embeddings, ranks, scores and classes."""
