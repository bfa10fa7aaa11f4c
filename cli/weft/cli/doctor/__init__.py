"""`weft doctor`: facts about this host, and findings of them."""
