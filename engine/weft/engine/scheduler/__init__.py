"""Who runs in the next step, and why. Pure Python; it owns the state of every request."""
