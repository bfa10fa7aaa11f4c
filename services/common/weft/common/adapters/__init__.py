"""The adapter registry: names, the contents that they refer to, and the location of the files."""
