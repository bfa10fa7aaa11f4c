"""Breaks guarantees of the product on purpose, to show that a chaos run detects it."""
