"""From safetensors to fused, packed parameters."""
