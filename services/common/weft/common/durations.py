"""Seconds as protobuf durations."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration


def duration(seconds: float) -> Duration:
    """Seconds as a protobuf Duration."""
    result = Duration()
    result.FromNanoseconds(int(seconds * 1e9))
    return result
