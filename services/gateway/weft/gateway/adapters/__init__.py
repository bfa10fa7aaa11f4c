"""LoRA adapters at the gateway: what names mean, who holds them, loading and unloading."""
