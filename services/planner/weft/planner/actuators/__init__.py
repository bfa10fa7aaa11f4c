"""What a planner that may act changes, each kind in a file of its own."""
