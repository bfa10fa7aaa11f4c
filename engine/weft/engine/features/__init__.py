"""Capabilities that the loop knows by interfaces alone: constraints, adapters, drafts. Only
`loop.build` imports them.
"""
