"""A package, so that its mesh ends with its last test."""
