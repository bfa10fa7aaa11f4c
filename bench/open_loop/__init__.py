"""Load on any OpenAI server: arrivals that do not wait for answers, by several client processes."""
