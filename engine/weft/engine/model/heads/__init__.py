"""Draft heads: EAGLE-1, 2 and 3, and MTP."""
