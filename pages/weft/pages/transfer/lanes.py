"""The choice of a transport: what a process offers to its peers, and what a filler takes of it.

For each pair of processes: NIXL, else memory that both map, else gRPC `data` messages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.contract.handle import KvHandle, NixlTargetInfo, SharedTargetInfo
from weft.contract.settings import TransportName
from weft.pages.transfer.nixl_binding import nixl_available

Lane = Literal["nixl", "shared", "data"]
Target = NixlTargetInfo | SharedTargetInfo


def best_lane(wanted: TransportName) -> Lane:
    """The best transport of a process that may use what `wanted` says. NIXL is chosen where it can
    be loaded, or is wanted alone.
    """
    if wanted == "nixl" or (wanted == "auto" and nixl_available()[0]):
        return "nixl"
    return "data" if wanted == "data" else "shared"


@dataclass(frozen=True, slots=True, kw_only=True)
class FillerLanes:
    """The transports over which a filler can write."""

    nixl_version: str | None = None
    """None: it has no NIXL."""
    shares: bool = False
    """Whether it can map memory of owners on its host."""
    memory_type: str = "DRAM"
    """Kind of the memory from which it writes, as NIXL names it. Owners with another kind get
    `data`.
    """

    def choose(self, handle: KvHandle) -> Target | None:
        """The offer that the filler takes; None: it sends `data`. Shared memory may turn out to be
        out of reach.
        """
        if handle.nixl is not None and self.nixl_version is not None:
            return handle.nixl if handle.nixl.memory_type == self.memory_type else None
        if handle.shared is not None and self.shares:
            return handle.shared if handle.shared.memory_type == self.memory_type else None
        return None
