"""Gathers logits on rank 0, of which each rank computes a part of the vocabulary.

The other ranks write their parts into rank 0's memory and count, by row and rank, what they have
written. Rank 0 waits until all parts of a row have arrived. A rank writes again only after it has
received the tokens drawn from these logits (`weft.kernels.ops.peers.triton_sum.share_tokens`), so
that one place suffices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.peers.triton_sum import await_turn
from weft.kernels.shared.dependent_launch import launch_options, release_next, wait_for_last
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_BLOCK = 4096
_ALIGNMENT = 256


class LogitsMemory(NamedTuple):
    """A rank's view of the logits on rank 0."""

    rank: int
    size: int
    columns: int
    """V, the whole vocabulary."""
    rows: int
    """Most rows."""
    logits: torch.Tensor
    """[rows, V] float32: this rank's own memory, used on rank 0."""
    bases: torch.Tensor
    """[size] int64 on the device: address in this process of each rank's memory, which has the
    logits and, after them, the counts [rows, size] int32.
    """
    turns: torch.Tensor
    """[rows] int32 on the device: number of programs that each rank has run for a row."""
    control: torch.Tensor
    """[2] int64 on the device: addresses on the host of the stop word (uint32) and of the longest
    wait in nanoseconds (int64); 0: there are none.
    """

    @property
    def share(self) -> slice:
        """The tokens whose logits this rank computes."""
        begin = self.rank * share_of(self.columns, self.size)
        return slice(begin, min(self.columns, begin + share_of(self.columns, self.size)))


def share_of(columns: int, size: int) -> int:
    """Most tokens whose logits one rank computes."""
    return -(-columns // (16 * size)) * 16


def counts_at(columns: int, rows: int) -> int:
    """Offset of the counts in a rank's memory, in bytes."""
    return -(-4 * columns * rows // _ALIGNMENT) * _ALIGNMENT


def memory_bytes(size: int, columns: int, rows: int) -> int:
    """Bytes of a rank's memory."""
    return counts_at(columns, rows) + 4 * size * rows


def gather_logits(memory: LogitsMemory, part: torch.Tensor) -> torch.Tensor:
    """Brings the parts of all ranks together on rank 0. All ranks must call it alike.

    Args:
        part: [L, columns of the rank's share] float32, contiguous.

    Returns:
        [L, V] float32, valid until the next call; meaningless on other ranks than 0.
    """
    rows, width = part.shape
    share = memory.share
    is_float = part.dtype == torch.float32 and part.is_contiguous()
    if rows > memory.rows or width != share.stop - share.start or not is_float:
        raise ValueError(
            f"a part {tuple(part.shape)} {part.dtype} of logits {memory.rows, memory.columns}"
        )
    blocks = cdiv(share_of(memory.columns, memory.size), _BLOCK)
    if rows:
        _gather_kernel[(rows * blocks,)](
            *(part, width, share.start, memory.columns, blocks, memory.bases, memory.turns),
            *(memory.control, counts_at(memory.columns, memory.rows)),
            RANK=memory.rank, SIZE=memory.size, LANES=next_power_of_2(memory.size),
            BLOCK=_BLOCK, HAS_TIMER=part.is_cuda, num_warps=8, **launch_options(part.device),
        )  # fmt: skip
    return memory.logits[:rows]


@triton.jit
def _gather_kernel(
    part: tl.tensor,
    width: int,
    first: int,
    columns: int,
    blocks: int,
    bases: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    counts_at: int,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    release_next()
    row = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    base = tl.load(bases)
    counts = (base + counts_at).to(tl.pointer_type(tl.int32)) + row * SIZE
    logits = tl.multiple_of(base.to(tl.pointer_type(tl.float32)), 16)
    wait_for_last()
    values = tl.load(part + row.to(tl.int64) * width + column, mask=mask)
    tl.store(logits + row.to(tl.int64) * columns + first + column, values, mask=mask)
    if RANK != 0:
        tl.debug_barrier()
        tl.atomic_add(counts + RANK, 1, sem="release", scope="sys")
    elif block == 0:
        turn = tl.load(turns + row) + blocks
        lane = tl.arange(0, LANES)
        others = (lane < SIZE) & (lane != 0)
        await_turn(counts + lane, others, lane, turn, control, LANES, HAS_TIMER)
        tl.store(turns + row, turn)
