"""Processes that add up, share tokens and gather logits as ranks with a GPU each do, by Triton's
interpreter on memory of the host.

    python -m weft.testing.kernels.peer_ranks FD BYTES SIZE SEED STORE
"""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from weft.engine.parallel import device_peers
from weft.engine.parallel.device_peers import DevicePeers
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.norm import Norm
from weft.testing.kernels.as_on_gpu import as_on_gpu

WIDTH, COLUMNS, LOGITS_ROWS, EPS = 24, 5000, 2, 1e-5
NEARLY_AROUND = (1 << 31) - 3
"""Exchanges so far, of which the next ones wrap around."""
BYTES_OF_RANK = 1 << 20
"""Of the memory of each rank."""


class Kind(NamedTuple):
    """What sums one set of peers makes."""

    dtype: torch.dtype
    once: int
    """Most rows of sums with one exchange."""
    twice: int
    """Most rows of sums with two exchanges, by rank."""


KINDS = (
    Kind(torch.float32, 2, 2),
    Kind(torch.float16, 2, 2),
    Kind(torch.float16, 4, 1),
)


class Case(NamedTuple):
    """What all ranks compute together, drawn alike by each of them."""

    parts: torch.Tensor
    """[size, T, WIDTH]."""
    stream: torch.Tensor
    """[T, WIDTH]."""
    gain: torch.Tensor
    """[WIDTH]."""
    tokens: torch.Tensor
    """[L] int64, of rank 0."""
    logits: torch.Tensor
    """[up to LOGITS_ROWS, COLUMNS]."""


class Found(NamedTuple):
    """What a rank has found."""

    total: torch.Tensor
    normed: torch.Tensor
    tap: torch.Tensor
    plain: torch.Tensor
    """The sum without a norm."""
    tokens: torch.Tensor
    logits: torch.Tensor
    """Of rank 0."""


def cases_of(size: int, kind: Kind, seed: int) -> list[Case]:
    """Few rows, which take one exchange, and many, which take two where there are two, in launches
    one after another; twice, so that places are used again.
    """
    numbers = torch.Generator().manual_seed(seed)
    cases = []
    for rows in (1, 2 * size + 3, 2, 1, 2 * size + 1):
        count = int(torch.randint(1, 300, (1,), generator=numbers))
        cases.append(
            Case(
                torch.randn(size, rows, WIDTH, generator=numbers).to(kind.dtype),
                torch.randn(rows, WIDTH, generator=numbers).to(kind.dtype),
                torch.rand(WIDTH, generator=numbers).to(kind.dtype),
                torch.randint(0, 1 << 40, (count,), generator=numbers),
                torch.randn(1 + rows % 2, COLUMNS, generator=numbers),
            )
        )
    return cases


class HostMemory:
    """Stands for torch's symmetric memory: each rank has a part of a segment.

    Args:
        segment: Of `BYTES_OF_RANK` bytes a rank.
        rank: Of this process.
        size: Number of ranks.
    """

    def __init__(self, segment: Segment, rank: int, size: int) -> None:
        self._segment, self._rank, self._size = segment, rank, size
        self._used = 0

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory of this rank."""
        assert dtype == torch.uint8
        assert device.type == "cpu"
        begin = self._used
        self._used += -(-num_bytes // 256) * 256
        assert self._used <= BYTES_OF_RANK
        return self._bytes(self._rank, begin, num_bytes)

    def rendezvous(self, memory: torch.Tensor, ranks: dist.ProcessGroup) -> SimpleNamespace:
        """The addresses of all ranks' memory, which all of them have made alike."""
        assert ranks.size() == self._size
        begin = memory.data_ptr() - self._bytes(self._rank, 0, 1).data_ptr()
        own = [self._bytes(rank, begin, len(memory)) for rank in range(self._size)]
        return SimpleNamespace(
            buffer_ptrs=[part.data_ptr() for part in own],
            get_buffer=lambda rank, shape, dtype: own[rank].view(dtype).view(shape),
        )

    def _bytes(self, rank: int, begin: int, size: int) -> torch.Tensor:
        found: Any = torch.from_numpy(self._segment.bytes_at(rank * BYTES_OF_RANK + begin, size))
        return found


def run_ranks(size: int, seed: int, store_path: str) -> tuple[list[list[Found]], list[str]]:
    """Computes all cases in a process for each rank, of which this one is the first.

    Args:
        size: Number of ranks.
        seed: Of the cases.
        store_path: A new file, by which the ranks find one another.

    Returns:
        What the first rank has found, by kind; and a digest of all ranks' results but the logits.
    """
    segment = Segment.create(size * BYTES_OF_RANK, "test")
    given = (segment.number, segment.size, size, seed, store_path)
    others = subprocess.Popen(
        [sys.executable, "-m", __name__, *map(str, given)], pass_fds=(segment.number,)
    )
    try:
        found = run_rank(segment, 0, size, seed, store_path)
        assert others.wait(120) == 0
    finally:
        others.kill()
        others.wait()
    return found


def run_rank(
    segment: Segment, rank: int, size: int, seed: int, store_path: str
) -> tuple[list[list[Found]], list[str]]:
    """See `run_ranks`."""
    calls = SimpleNamespace(
        cudaHostRegister=lambda address, num_bytes, flags: 0,
        cudaHostUnregister=lambda address: 0,
    )
    with as_on_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_peers, "symmetric", HostMemory(segment, rank, size))
        patch.setattr(torch.cuda, "cudart", lambda: calls)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
        patch.setattr(device_peers, "_LOGITS_ROWS", LOGITS_ROWS)
        for name in ("TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE"):
            patch.setenv(name, "1")  # `join` leaves what is set.
        ranks = device_peers.join(rank, size, store_path)
        try:
            found = [results_of(kind, rank, size, seed, ranks, patch) for kind in KINDS]
            digests = [""] * size
            dist.all_gather_object(digests, digest_of(found))
        finally:
            dist.destroy_process_group()
    return found, digests


def results_of(
    kind: Kind, rank: int, size: int, seed: int, ranks: dist.ProcessGroup, patch: pytest.MonkeyPatch
) -> list[Found]:
    """What a rank finds through new peers whose sums are of one kind."""
    row_bytes = WIDTH * kind.dtype.itemsize
    patch.setattr(device_peers, "_ONCE_BYTES", {8: kind.once * row_bytes})
    patch.setattr(device_peers, "_TWICE_BYTES", kind.twice * size * row_bytes)
    # No time limit on the host: the interpreter has no clock.
    group: Any = SimpleNamespace(
        rank=rank, size=size, words=(0, 0), stop_address=0, limit_address=0
    )
    device = torch.device("cpu")
    peers = DevicePeers(
        group, device, ranks, WIDTH, kind.dtype, COLUMNS, lambda phase: dist.barrier()
    )
    assert peers.sums == "in the GPUs' memory, which is one GPU's"
    memory = peers._memory
    assert memory.once_rows == kind.once
    memory.turns.fill_(NEARLY_AROUND)
    flags: Any = peers.mapped._kept[0]
    flags[: memory.layout.tokens].view(torch.int32).fill_(NEARLY_AROUND)
    dist.barrier()
    found = [result_of(peers, case, rank) for case in cases_of(size, kind, seed)]
    parts = peers.mapped.memory(8)
    parts[rank].fill_(1 + rank)
    dist.barrier()
    assert [int(part[7]) for part in parts] == list(range(1, 1 + size))
    peers.close()
    return found


def result_of(peers: DevicePeers, case: Case, rank: int) -> Found:
    """What a rank finds in one case."""
    total = case.stream.clone()
    wide = torch.zeros(len(total), 2 * WIDTH, dtype=total.dtype)
    tap = wide[:, WIDTH:]
    normed = peers.add_norm(case.parts[rank], total, Norm(case.gain, EPS), tap)
    assert normed is not None
    peers.meet()
    plain = peers.add_sum(case.parts[rank].float(), case.stream)
    share = peers.share_of_logits(len(case.logits))
    assert share is not None
    logits = peers.gather_logits(case.logits[:, share].contiguous()).clone()
    given = case.tokens if rank == 0 else torch.zeros_like(case.tokens)
    return Found(total, normed, tap, plain, peers.share_tokens(given), logits)


def digest_of(found: list[list[Found]]) -> str:
    """Of all bits but those of the logits."""
    digest = hashlib.sha256()
    for one in chain(*found):
        for part in one[:5]:
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(argv: list[str]) -> None:
    """Computes as all ranks but the first, each in a process."""
    number, num_bytes, size, seed = map(int, argv[:4])
    segment = Segment(number, num_bytes)
    # Nothing has been computed yet, so there are no threads that a process could miss.
    context = multiprocessing.get_context("fork")
    given = size, seed, argv[4]
    others = [
        context.Process(target=run_rank, args=(segment, rank, *given)) for rank in range(2, size)
    ]
    for other in others:
        other.start()
    run_rank(segment, 1, *given)
    for other in others:
        other.join()
    sys.exit(max((abs(other.exitcode or 0) for other in others), default=0))


if __name__ == "__main__":
    main(sys.argv[1:])
