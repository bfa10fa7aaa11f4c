"""Metrics, spans and the request log of the gateway."""
