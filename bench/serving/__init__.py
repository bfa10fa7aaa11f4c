"""Parts of bench.py: the work, the systems that do it, the check of what they answered."""
