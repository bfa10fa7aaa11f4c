"""Servers and channels: TLS, authorisation, errors, interceptors, circuit breakers."""
