"""The OpenAI face: JSON bodies in, JSON or server-sent events out."""
