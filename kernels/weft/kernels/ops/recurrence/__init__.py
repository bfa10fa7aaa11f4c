"""Recurrences of heads whose state is a matrix: how their rows lie, and their forms."""
