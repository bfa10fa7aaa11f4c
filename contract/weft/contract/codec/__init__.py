"""Conversion between declared types and protobuf messages."""
