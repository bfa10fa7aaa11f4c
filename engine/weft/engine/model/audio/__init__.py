"""Towers that make rows of clips."""
