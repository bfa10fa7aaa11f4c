"""Image towers: vision transformers over packed patches, and what makes rows of the language model
of them.
"""
