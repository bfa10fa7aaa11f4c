"""A trainer's side of process groups: SGLang's trainers make theirs in this way, with PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from weft.cli.up.ports import free_ports
from weft.contract.weights import SentTensor
from weft.engine.model.weights.announced import Announced, decode_tensors, encode_tensors

WAIT = timedelta(seconds=60)


def free_port() -> int:
    return free_ports("127.0.0.1", 1)[0]


class Sender:
    """Rank 0 of a group over gloo. Making it waits until all other ranks have come."""

    def __init__(self, port: int, size: int, name: str = "trainer") -> None:
        store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=WAIT))
        store.set_timeout(WAIT)
        self._group, _ = c10d._new_process_group_helper(
            size,
            0,
            [],
            c10d.Backend("gloo"),
            c10d.PrefixStore(name, store),
            group_name=c10d.GroupName(name),
            timeout=WAIT,
            group_desc="weights",
        )
        c10d._world.pg_group_ranks[self._group] = {rank: rank for rank in range(size)}

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        for one in tensors:
            dist.broadcast(one.contiguous(), 0, group=self._group)

    def close(self) -> None:
        c10d.destroy_process_group(self._group)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a folder's files, in the order of their names."""
    found = dict[str, torch.Tensor]()
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def described(tensors: Mapping[str, torch.Tensor]) -> list[SentTensor]:
    return [
        SentTensor(name=name, dtype=str(one.dtype).removeprefix("torch."), shape=list(one.shape))
        for name, one in tensors.items()
    ]


def announced(tensors: Mapping[str, torch.Tensor]) -> Announced:
    return decode_tensors(encode_tensors(described(tensors)))[0]


def packed(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[torch.Tensor]:
    """As vLLM's trainers put tensors together: a pack ends with the one that makes it too large."""
    packs, part, size = list[torch.Tensor](), list[torch.Tensor](), 0
    for one in tensors:
        data = one.contiguous().view(-1).view(torch.uint8)
        part.append(data)
        size += data.numel()
        if size > most_bytes:
            packs.append(torch.cat(part))
            part, size = [], 0
    return [*packs, torch.cat(part)] if part else packs
