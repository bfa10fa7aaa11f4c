"""What crosses the border between an engine and the server process in front of it. No torch."""
