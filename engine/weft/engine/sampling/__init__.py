"""Draws tokens from logits: parameters by slot, masks, edits of logits, log-probabilities."""
