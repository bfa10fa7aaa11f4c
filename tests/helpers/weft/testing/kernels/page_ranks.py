"""Processes that exchange queries and results as ranks with a GPU each do that divide pages, by
Triton's interpreter on memory of the host.

    python -m weft.testing.kernels.page_ranks FD BYTES SIZE SEED STORE RANK
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from weft.engine.parallel import device_page_ranks, device_peers
from weft.engine.parallel.device_page_ranks import DividedPool
from weft.engine.parallel.device_peers import DevicePeers
from weft.engine.parallel.segment import Segment
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.peer_ranks import BYTES_OF_RANK, NEARLY_AROUND, HostMemory

DIVIDE, HEADS, DIM, VALUE, ROWS, PAGES = 2, 19, 10, 6, 3, 9
"""Ranks that divide pages, heads of each, elements of queries and results, rows of a launch, and
pages of all ranks."""


class Case(NamedTuple):
    """What all ranks exchange, drawn alike by each of them."""

    queries: torch.Tensor
    """[size, T, HEADS, DIM]."""
    values: torch.Tensor
    """[size, T, DIVIDE * HEADS, VALUE]."""
    sums: torch.Tensor
    """[size, T, DIVIDE * HEADS] float32."""
    sinks: torch.Tensor | None
    """[size, HEADS] float32."""


class Found(NamedTuple):
    queries: list[torch.Tensor]
    merged: list[torch.Tensor]
    pages: torch.Tensor


def cases_of(size: int, seed: int) -> list[Case]:
    """Of few rows and of many, so that places are used again."""
    numbers = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers)

    cases = []
    for rows in (1, 2 * ROWS + 1, 2, ROWS, 1):
        sums = 9 * draw(size, rows, DIVIDE * HEADS)
        sums[:, :, ::5] = -1e38  # Nothing is seen on any rank.
        sums[0, :, 1::5] = -1e38
        sinks = draw(size, HEADS) if rows != 2 else None
        queries, values = draw(size, rows, HEADS, DIM), draw(size, rows, DIVIDE * HEADS, VALUE)
        cases.append(Case(queries, values, sums, sinks))
    return cases


def run_ranks(size: int, seed: int, store_path: str) -> list[Found]:
    """What all ranks have found, in their order."""
    segment = Segment.create(size * BYTES_OF_RANK, "test")
    given = (segment.number, segment.size, size, seed, store_path)
    others = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, given), str(rank)],
            pass_fds=(segment.number,),
        )
        for rank in range(1, size)
    ]
    try:
        found = run_rank(segment, 0, size, seed, store_path)
        assert [other.wait(120) for other in others] == [0] * len(others)
    finally:
        for other in others:
            other.kill()
            other.wait()
    return found


def run_rank(segment: Segment, rank: int, size: int, seed: int, store_path: str) -> list[Found]:
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: 0,
        cudaHostUnregister=lambda address: 0,
    )
    with as_on_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_peers, "symmetric", HostMemory(segment, rank, size))
        patch.setattr(torch.cuda, "cudart", lambda: calls)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(device_peers, "_LOGITS_ROWS", 1)
        patch.setattr(device_peers, "_ONCE_BYTES", {8: 64})
        patch.setattr(device_peers, "_TWICE_BYTES", 64 * size)
        patch.setattr(device_peers, "MAX_ROWS", ROWS)
        for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
            patch.setenv(name, "1")
        ranks = device_peers.join(rank, size, store_path)
        try:
            found: list[Any] = [None] * size
            dist.all_gather_object(found, tuple(results_of(rank, size, seed, ranks)))
        finally:
            dist.destroy_process_group()
    return [Found(*one) for one in found]


def results_of(rank: int, size: int, seed: int, ranks: dist.ProcessGroup) -> Found:
    group: Any = SimpleNamespace(
        rank=rank, size=size, words=(0, 0), stop_address=0, limit_address=0
    )
    peers = DevicePeers(
        *(group, torch.device("cpu"), ranks, 4, torch.float32, 8, lambda phase: dist.barrier())
    )
    peers.divide_pages(DIVIDE, HEADS, DIM, VALUE, 4)
    pages = peers.pages
    assert isinstance(pages, device_page_ranks.DevicePageRanks)
    memory = pages._memory
    memory.turns.fill_(NEARLY_AROUND)
    flags: Any = peers._kept[-2]
    flags[: memory.layout.queries].view(torch.int32).fill_(NEARLY_AROUND)
    dist.barrier()
    gathered, merged = [], []
    for case in cases_of(size, seed):
        gathered.append(pages.gather(case.queries[rank]))
        sinks = None if case.sinks is None else case.sinks[rank]
        merged.append(pages.merge(case.values[rank], case.sums[rank], sinks))
    own = 1 + -(-PAGES // DIVIDE)
    pools = [flat.view(torch.int32).view(own, 2) for flat in peers.mapped.memory(own * 8)]
    pools[rank][:, 0] = torch.arange(own) * 10 + rank
    first = rank // DIVIDE * DIVIDE
    divided = DividedPool(pages, pools[first : first + DIVIDE], peers.meet)
    dist.barrier()
    divided.copy([2, 3, 4, 5], [7, 1, 6, 8])
    dist.barrier()
    peers.close()
    return Found(gathered, merged, pools[rank].clone())


def main(argv: list[str]) -> None:
    number, num_bytes, size, seed = map(int, argv[:4])
    run_rank(Segment(number, num_bytes), int(argv[5]), size, seed, argv[4])


if __name__ == "__main__":
    main(sys.argv[1:])
