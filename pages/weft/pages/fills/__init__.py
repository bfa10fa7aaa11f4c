"""Fills of pages for others: a filler's leases, chunks and budget, and quarantine."""
