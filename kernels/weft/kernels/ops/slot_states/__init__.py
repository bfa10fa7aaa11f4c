"""Recurrent layers in steps of few rows a request, on a GPU. Blocks and rings are read and written
in place, and only the device knows where requests begin.

A layer starts from the block of a request's last page border, takes the positions since then from
the ring, then the step's rows. It writes the next block at a border whose next row is certain to
stay, which a draft is not:

    border          start   start + count
    |-- ring rows ----|-- new rows --|       a block is written at the last border <= start + 1

States in between are never computed. The result of reading such a state is computed from the block,
and from the keys and updates of the rows since, which the ring holds too. So a step reads a
request's states once, and writes them once in `page_size` tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.slot_states.spec import DeltaGates, HeadForm, LayerMemory, SlotRows
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.slot_states import triton_delta as _triton_delta
    from weft.kernels.ops.slot_states import triton_states as _triton_states
else:
    _triton_delta = deferred(__name__, "weft.kernels.ops.slot_states.triton_delta")
    _triton_states = deferred(__name__, "weft.kernels.ops.slot_states.triton_states")


def plan_slots(
    slots: torch.Tensor,
    cu_q_lens: torch.Tensor,
    positions: torch.Tensor,
    borders: torch.Tensor,
    ends: torch.Tensor,
    blocks: torch.Tensor,
    page_size: int,
) -> SlotRows:
    """Decides where requests begin and what they write.

    Args:
        slots: [R] int64, all different except for padding.
        cu_q_lens: [R + 1] int32: rows of each request; padding may have none.
        positions: [T] int64, complete.
        borders: [slots + 1] int64: border of each slot's newest block; written.
        ends: [slots + 1] int64: position after the last row of each slot that such a step took,
            which may be a draft; written.
        blocks: [R, 3] int64: the block at border b in column b / page_size mod 3; 0: no block is to
            be written there.
    """
    if slots.is_cuda:
        given = slots, cu_q_lens, positions, borders, ends, blocks
        return SlotRows(_triton_states.plan(*given, page_size))
    first, counts = cu_q_lens[:-1].long(), cu_q_lens.diff().long()
    starts = positions[first.clamp(max=len(positions) - 1)] * (counts > 0)
    before = borders[slots] * (counts > 0)
    after = (starts + 1) // page_size * page_size
    requests = torch.arange(len(slots))
    old = blocks[requests, before // page_size % 3] * (before > 0)
    new = blocks[requests, after // page_size % 3]
    is_new = (after > before) & (new > 0)
    borders[slots[is_new]] = after[is_new]
    found = torch.minimum(ends[slots], starts).maximum(before)
    ends[slots[counts > 0]] = (starts + counts)[counts > 0]
    columns = (slots, first, counts, starts, before, old, torch.where(is_new, after, -1), new)
    return SlotRows(torch.stack((*columns, found), dim=1))


def step_heads(
    form: HeadForm, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Takes rows through the states of a layer.

    Args:
        memory: Rings receive the new rows, keys and updates; blocks that `rows` names are written.
        inputs: For each part of the ring, [T, *shape].

    Returns:
        [T, H, Dv] of the dtype of the first part; zeros for rows of no request.
    """
    return _triton_states.step_heads(form, rows.plan, memory, inputs)


def step_delta(
    form: HeadForm,
    gates: DeltaGates,
    rows: SlotRows,
    memory: LayerMemory,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`step_heads` of a gated delta net that also computes its gates.

    Args:
        form: A layer with a decay for each head, and without a bias of the convolution.
        gates: How the gates come from the second input.
        inputs: The convolution's input, [T, channels] or [T, Hk, channels of a key head] with any
            distance between heads, of the ring's dtype; and the product for the gates, [T, 2 * H].

    Returns:
        [T, H, Dv] of the dtype of the first input; zeros for rows of no request.
    """
    return _triton_delta.step_delta(form, gates, rows.plan, memory, inputs)


def step_conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: SlotRows,
    memory: LayerMemory,
    x: torch.Tensor,
) -> torch.Tensor:
    """Takes rows through a layer whose whole state is that of a short convolution.

    Args:
        weight: [taps, channels] float32.
        bias: [channels] float32, or None.
        memory: The ring holds x, [channels]; blocks hold its tail, [channels, taps - 1].
        x: [T, channels].

    Returns:
        [T, channels] of the dtype of `x`; zeros for rows of no request.
    """
    return _triton_states.step_conv(weight, bias, rows.plan, memory, x)
