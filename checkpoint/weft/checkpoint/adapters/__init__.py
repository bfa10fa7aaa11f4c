"""LoRA adapters on disk: files, names of their tensors, digests, and the rows that they need."""
