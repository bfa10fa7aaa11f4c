"""Constrained output: grammars are compiled in another process, masks computed during the forward
pass.
"""
