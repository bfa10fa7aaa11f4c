"""What the gateway says of a mesh's members in `weft.v1.MeshService` and clients recognise."""

from __future__ import annotations

NOT_ASKED = "not asked yet"
"""`MeshMember.problem` of a KV store that the gateway has not asked yet for the present watchers."""
