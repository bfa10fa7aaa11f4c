"""Data that an engine and the server process in front of it exchange. No torch."""
