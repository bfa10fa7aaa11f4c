"""The host's half of drawing: sampler rows, masks, what counts of drafted tokens."""
