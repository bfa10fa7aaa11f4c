"""Draws of tokens from logits, the same on every device."""
