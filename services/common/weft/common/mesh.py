"""What the gateway says of a mesh's members in `weft.v1.MeshService` and clients recognise."""

from __future__ import annotations

NOT_ASKED = "not asked yet"
"""`MeshMember.problem` of a KV store that the gateway has yet to ask for its present watchers."""
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.5, 60.0
"""Bounds of `WatchMeshRequest.interval`."""
