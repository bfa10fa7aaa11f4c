"""What the process of a rank is bound to when it begins."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    cores: str = ""
    """Cores that it may use, in the kernel's form, as 0-55,112-167; empty: all of its parent's."""
    memory_node: int | None = None
    """NUMA node whose memory it takes while there is some; None: as its parent."""
    net_devices: str = ""
    """Devices that NIXL may use, as `UCX_NET_DEVICES` has them; empty: as its parent."""

    @property
    def is_bound(self) -> bool:
        """Whether it is bound to cores or to memory."""
        return bool(self.cores) or self.memory_node is not None
