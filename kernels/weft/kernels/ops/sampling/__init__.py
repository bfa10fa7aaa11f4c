"""Draws of tokens from logits, the same on every device: `cpu` for rows that the host has changed,
`device` for rows that are changed where they are drawn.
"""
