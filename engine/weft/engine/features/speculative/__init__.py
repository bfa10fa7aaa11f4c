"""Drafters, which propose drafts, and gates, which decide how many drafts a step verifies."""
