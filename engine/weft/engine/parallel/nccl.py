"""Sums over ranks that have a GPU each, by NCCL."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from weft.kernels import cpu

_TIMEOUT = datetime.timedelta(seconds=60)
"""Longest time of one collective. Then torch's watchdog ends the process, and the group with it."""


class NcclPeers:
    """Implements `weft.kernels.peers.Peers`.

    NCCL reduces each number on one rank and copies the sum to all others, so that all ranks get the
    same bits. The order of the additions depends on the size.

    Args:
        rank: Number of this rank.
        size: Number of ranks.
        device: GPU of this rank; no other rank uses it.
        store_path: A file that all ranks use to find one another, new for each group.
    """

    def __init__(self, rank: int, size: int, device: torch.device, store_path: str) -> None:
        self.rank = rank
        self.size = size
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        store = FileStore(store_path, size)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=device
        )
        # A first sum creates the communicator and loads its kernels before memory is measured.
        self.add_sum(torch.zeros((1, 8), device=device), torch.zeros((1, 8), device=device))
        torch.cuda.synchronize(device)

    def native(self) -> cpu.PeersStruct:
        """See `Peers.native`: there is no native form."""
        raise NotImplementedError("native operations run on CPUs, NCCL adds up on GPUs")

    def check(self, lost: int) -> None:
        """See `Peers.check`: torch's watchdog ends a process whose peers are lost."""

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """See `Peers.add_sum`; sums in the residual's dtype."""
        part = partial.to(residual.dtype)
        dist.all_reduce(part)
        return part.add_(residual)
