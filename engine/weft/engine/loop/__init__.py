"""The loop of an engine: takes messages, plans a step, starts it, commits the previous step."""
