"""Chats with a mesh of real processes."""
