"""The host's half of a step: its input from the plan, sampler rows, masks, accepted tokens."""
