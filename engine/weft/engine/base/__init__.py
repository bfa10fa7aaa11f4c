"""What every package of the engine may use: settings, errors, clock, requests, faults.

It imports no other package of the engine.
"""
