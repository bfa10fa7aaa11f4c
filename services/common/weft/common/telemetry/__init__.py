"""Logs, spans and the request log that all services write in one form."""
