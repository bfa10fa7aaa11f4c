"""Formats of weights: numbers of few bits with their scales."""
