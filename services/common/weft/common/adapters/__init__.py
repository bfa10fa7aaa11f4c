"""The registry of adapters: which names there are, what they mean, and where the files lie."""
