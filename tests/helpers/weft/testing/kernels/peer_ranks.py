"""Processes that add up, share tokens and gather logits as ranks with a GPU each do, by Triton's
interpreter on memory of the host.

    python -m weft.testing.kernels.peer_ranks FD BYTES RANK SIZE DTYPE SEED
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any, NamedTuple

import numpy as np
import torch
from weft.engine.parallel.segment import Segment
from weft.kernels.gpu import peer_logits, peer_sum
from weft.kernels.gpu.peer_logits import LogitsMemory
from weft.kernels.gpu.peer_sum import PeerMemory
from weft.kernels.norm import Norm
from weft.testing.kernels.as_on_gpu import as_on_gpu

WIDTH, COLUMNS, LOGITS_ROWS, EPS = 24, 5000, 2, 1e-5
NEARLY_AROUND = (1 << 31) - 3
"""Exchanges so far, of which the next ones wrap around."""


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
    tokens: torch.Tensor
    logits: torch.Tensor
    """Of rank 0."""


def cases_of(size: int, dtype: torch.dtype, seed: int) -> list[Case]:
    """Few rows, which take one exchange, the fewest in words, and many, which take two, in launches
    one after another; twice, so that places are used again.
    """
    numbers = torch.Generator().manual_seed(seed)
    cases = []
    for rows in (1, 2 * size + 3, 2, 1, 2 * size + 1):
        count = int(torch.randint(1, 300, (1,), generator=numbers))
        cases.append(
            Case(
                torch.randn(size, rows, WIDTH, generator=numbers).to(dtype),
                torch.randn(rows, WIDTH, generator=numbers).to(dtype),
                torch.rand(WIDTH, generator=numbers).to(dtype),
                torch.randint(0, 1 << 40, (count,), generator=numbers),
                torch.randn(1 + rows % 2, COLUMNS, generator=numbers),
            )
        )
    return cases


class Ranks:
    """The memory of some ranks, which each of their processes maps.

    Args:
        segment: Of `num_bytes(size)` bytes.
        size: Number of ranks.
        dtype: Of rows; float32 or of 16 bits.
    """

    def __init__(self, segment: Segment, size: int, dtype: torch.dtype) -> None:
        self.size, self.dtype, self.rows = size, dtype, rows_of(size, dtype)
        self._segment = segment
        self._of_sums = layout_of(size, dtype).end
        self._of_logits = peer_logits.memory_bytes(size, COLUMNS, LOGITS_ROWS)

    @classmethod
    def create(cls, size: int, dtype: torch.dtype) -> Ranks:
        """Makes the memory, in which flags are about to wrap around."""
        layout = layout_of(size, dtype)
        of_logits = peer_logits.memory_bytes(size, COLUMNS, LOGITS_ROWS)
        ranks = cls(Segment.create(size * (layout.end + of_logits), "test"), size, dtype)
        for rank in range(size):
            flags = ranks._memory(rank, 0, layout.tokens).view(torch.int32)
            flags.fill_(NEARLY_AROUND)
        return ranks

    def start(self, rank: int, seed: int) -> subprocess.Popen[bytes]:
        """Starts the process of another rank."""
        number = self._segment.number
        name = str(self.dtype).removeprefix("torch.")
        given = (number, self._segment.size, rank, self.size, name, seed)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, given)],
            pass_fds=(number,),
            stdout=subprocess.PIPE,
        )

    def run(self, rank: int, seed: int) -> list[Found]:
        """Computes all cases as one of the ranks."""
        with as_on_gpu():
            return self._run(rank, seed)

    def _run(self, rank: int, seed: int) -> list[Found]:
        places = [self._memory(other, 0, 1).data_ptr() for other in range(self.size)]
        bases = torch.tensor(places)
        turns = torch.full((peer_sum.num_turns(*self.rows[1:]),), NEARLY_AROUND, dtype=torch.int32)
        nothing = torch.zeros(2, dtype=torch.int64)
        sums = PeerMemory(
            rank, self.size, WIDTH, self.dtype.itemsize, *self.rows, bases, turns, nothing
        )
        own = self._memory(rank, self._of_sums, 4 * LOGITS_ROWS * COLUMNS)
        logits = LogitsMemory(
            rank,
            self.size,
            COLUMNS,
            LOGITS_ROWS,
            own.view(torch.float32).view(LOGITS_ROWS, COLUMNS),
            bases + self._of_sums,
            torch.zeros(LOGITS_ROWS, dtype=torch.int32),
            nothing,
        )
        found = []
        for case in cases_of(self.size, self.dtype, seed):
            total = case.stream.clone()
            wide = torch.zeros(len(total), 2 * WIDTH, dtype=self.dtype)
            tap = wide[:, WIDTH:]
            normed = peer_sum.sum_rows(
                sums, case.parts[rank], total, total, Norm(case.gain, EPS), tap
            )
            assert normed is not None
            gathered = peer_logits.gather_logits(logits, case.logits[:, logits.share].contiguous())
            given = case.tokens if rank == 0 else torch.zeros_like(case.tokens)
            gathered = gathered.clone()
            tokens = peer_sum.share_tokens(sums, given)
            found.append(Found(total, normed, tap, tokens, gathered))
        return found

    def _memory(self, rank: int, begin: int, size: int) -> torch.Tensor:
        """Bytes of a rank's memory."""
        at = rank * (self._of_sums + self._of_logits) + begin
        found: Any = torch.from_numpy(self._segment.bytes_at(at, size))
        return found


def rows_of(size: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Most rows of sums in words, with one exchange and with two."""
    return int(dtype.itemsize == 2), 2, 2 * size


def layout_of(size: int, dtype: torch.dtype) -> peer_sum.Layout:
    """Of the memory of each rank."""
    words, once, twice = rows_of(size, dtype)
    return peer_sum.layout_of(size, dtype.itemsize * WIDTH, once, twice, words)


def main(argv: list[str]) -> None:
    """Computes as one rank, and writes a digest of what it has found to standard output."""
    number, num_bytes, rank, size = map(int, argv[:4])
    name, seed = argv[4], int(argv[5])
    ranks = Ranks(Segment(number, num_bytes), size, getattr(torch, name))
    np.save(sys.stdout.buffer, digest_of(ranks.run(rank, seed)))


def digest_of(found: list[Found]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """All bits but those of the logits, in one array."""
    parts = [part.contiguous() for one in found for part in one[:4]]
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [part.view(whole[part.element_size()]).long().flatten() for part in parts]
    joined: np.ndarray[Any, np.dtype[np.int64]] = torch.cat(bits).numpy()
    return joined


if __name__ == "__main__":
    main(sys.argv[1:])
