"""Parts of scripts/train_draft.py: an EAGLE-3 head trained on text that its target writes."""
