"""What clients call: a folder for each dialect, and what dialects share."""
