"""Constrained output by llguidance: schemas are rewritten into what it enforces, grammars compiled
in threads, masks computed during the forward pass.
"""
