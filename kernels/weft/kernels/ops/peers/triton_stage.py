"""Rows that GPUs of one host hand on through memory that both map.

The receiver has room for two steps' rows. Two flags count steps: `arrived`, in the receiver's
memory, and `taken`, in the sender's. Both ends count their steps (`turns`) on the device, since a
captured launch cannot carry a number of its own. A sender fills a place only after the rows of two
steps before have been taken from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from weft.kernels.ops.peers.triton_sum import await_turn
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_ARRIVED, _TAKEN, _ROWS = 0, 128, 256
"""Offsets in bytes in a rank's memory."""
_TILE = 4096
"""Words of one program."""


class StageMemory(NamedTuple):
    """One end of the link between two consecutive stages."""

    rank: int
    """The other end's rank, for messages."""
    size: int
    """Ranks."""
    capacity: int
    """Words of the rows of one step, at most."""
    receiver: int
    """Address, as this process maps it, of the receiver's memory, `memory_bytes` long."""
    sender: int
    """Address of the sender's."""
    turns: torch.Tensor
    """[1] int32 on the device, 0 at first: steps that this end has handed on."""
    control: torch.Tensor
    """[2] int64: as in `PeerMemory`."""


def memory_bytes(row_bytes: int, rows: int) -> int:
    """Bytes of each rank's memory, zeros at first."""
    return _ROWS + 2 * rows * row_bytes


def send_rows(memory: StageMemory, rows: torch.Tensor) -> None:
    """Hands on [T, H], contiguous. Raises ValueError if there is no room for so many."""
    words = _words(memory, rows)
    _await(memory, memory.sender + _TAKEN, 2)
    _copy(memory, words, is_sent=True)
    _signal_kernel[(1,)](memory.receiver + _ARRIVED, memory.turns, num_warps=1)


def receive_rows(memory: StageMemory, out: torch.Tensor) -> torch.Tensor:
    """Waits on the device for rows of the shape of `out`, contiguous, and copies them there. Raises
    ValueError if there is no room for so many.
    """
    words = _words(memory, out)
    _await(memory, memory.receiver + _ARRIVED, 0)
    _copy(memory, words, is_sent=False)
    _signal_kernel[(1,)](memory.sender + _TAKEN, memory.turns, num_warps=1)
    return out


def _words(memory: StageMemory, rows: torch.Tensor) -> torch.Tensor:
    num_bytes = rows.numel() * rows.element_size()
    if num_bytes > 4 * memory.capacity or num_bytes % 4 or not rows.is_contiguous():
        raise ValueError(f"rows of {num_bytes} bytes, and room for {4 * memory.capacity}")
    return rows.view(torch.int32).view(-1) if num_bytes else rows.new_empty(0, dtype=torch.int32)


def _await(memory: StageMemory, flag: int, lead: int) -> None:
    _await_kernel[(1,)](
        *(flag, memory.turns, memory.control, lead),
        PEER=memory.rank,
        LANES=next_power_of_2(memory.size),
        HAS_TIMER=memory.turns.is_cuda,
        num_warps=1,
    )


def _copy(memory: StageMemory, words: torch.Tensor, *, is_sent: bool) -> None:
    _copy_kernel[(max(1, cdiv(words.numel(), _TILE)),)](
        *(words, memory.receiver + _ROWS, memory.turns, words.numel(), memory.capacity),
        IS_SENT=is_sent,
        TILE=_TILE,
        num_warps=8,
    )


@triton.jit
def _await_kernel(
    flag: tl.tensor,
    turns: tl.tensor,
    control: tl.tensor,
    lead: int,
    PEER: tl.constexpr,
    LANES: tl.constexpr,
    HAS_TIMER: tl.constexpr,
) -> None:
    turn = tl.load(turns) + 1 - lead
    lane = tl.arange(0, LANES)
    flags = flag.to(tl.int64).to(tl.pointer_type(tl.int32)) + lane * 0
    await_turn(flags, lane == PEER, lane, turn, control, LANES, HAS_TIMER)


@triton.jit(do_not_specialize=["count"])
def _copy_kernel(
    words: tl.tensor,
    room: tl.tensor,
    turns: tl.tensor,
    count: int,
    capacity: int,
    IS_SENT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    turn = tl.load(turns) + 1
    place = room.to(tl.int64).to(tl.pointer_type(tl.int32)) + (turn & 1).to(tl.int64) * capacity
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = at < count
    if IS_SENT:
        tl.store(place + at, tl.load(words + at, mask=mask), mask=mask)
    else:
        # Another GPU has written these words, so they are not read from a cache near the processor.
        tl.store(words + at, tl.load(place + at, mask=mask, cache_modifier=".cg"), mask=mask)


@triton.jit
def _signal_kernel(flag: tl.tensor, turns: tl.tensor) -> None:
    turn = tl.load(turns) + 1
    tl.atomic_xchg(
        flag.to(tl.int64).to(tl.pointer_type(tl.int32)), turn, sem="release", scope="sys"
    )
    tl.store(turns, turn)
