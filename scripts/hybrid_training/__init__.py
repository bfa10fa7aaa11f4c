"""Parts of scripts/train_hybrid.py."""
