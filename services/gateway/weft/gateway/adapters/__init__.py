"""LoRA adapters at the gateway: names, holders, loading and unloading."""
