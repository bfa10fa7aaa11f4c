"""Requests and what they hold: pages, windows, states, statistics of drafts."""
