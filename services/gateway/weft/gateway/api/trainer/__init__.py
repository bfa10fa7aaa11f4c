"""Calls that trainers make."""
