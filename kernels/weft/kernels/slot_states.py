"""Recurrent layers in steps of few rows a request, on a GPU: blocks and rings are read and written
in place, and only the device needs to know where requests begin.

A layer begins with the block of a request's last border, takes the positions since then from the
ring, then the step's rows. Where the row behind a page border is certain, it writes the next block:

    border          start   start + count
    |-- ring rows ----|-- new rows --|       a block is written at the last border <= start + 1

States that lie between are not made: a row finds in one what it finds in the block, and in the keys
and updates of the rows since, which the ring has too. So a step reads a request's states once, and
writes them once in `page_size` tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotRows(NamedTuple):
    """The first requests of a step, R, none of which has many rows."""

    plan: torch.Tensor
    """[R, 9] int64; for each request its slot, first row of the step, number of rows, position of
    that row, border, block of that border, border that is written (-1: none), its block, and the
    first position whose key and update are not in the ring.
    """


class LayerMemory(NamedTuple):
    """The memory in which one layer keeps the states of requests."""

    blocks: tuple[torch.Tensor, ...]
    """[num_blocks, *shape] of each part; contiguous within a block."""
    rings: tuple[torch.Tensor, ...]
    """[slots + 1, ring_rows, *shape] of each part; contiguous within a row."""
    found: tuple[torch.Tensor, ...] = ()
    """Keys, [slots + 1, ring_rows, heads of keys, Dk], and updates, [slots + 1, ring_rows, H, Dv],
    of rows that were taken; of layers with heads.
    """


class Channels(NamedTuple):
    """Where heads lie in the channels of a convolution."""

    first: int
    """The first head's first channel."""
    step: int
    """Channels from one head of keys to the next."""


class HeadForm(NamedTuple):
    """A layer whose heads have a matrix as state: the gated delta rule, or Mamba 2's.

    The first part of its ring is what the convolution reads, the second one the logarithm of the
    decay, [H] or [H, Dk], or, with `rates`, time steps [H]. The delta rule has beta, [H], as third.
    Blocks have states [H, Dk, Dv] float32 and the convolution's tail, [channels, taps - 1], whose
    channels may have an order of their own.
    """

    conv: torch.Tensor
    """[taps, channels] float32; SiLU follows."""
    bias: torch.Tensor | None
    """[channels] float32."""
    queries: Channels
    keys: Channels
    values: Channels
    heads: int
    shared: int
    """Heads for each head of keys, whose values lie side by side."""
    key_dim: int
    value_dim: int
    scale: float = 1.0
    """Factor on queries."""
    is_unit: bool = False
    """Whether keys and queries are normalised to length 1."""
    rates: torch.Tensor | None = None
    """[H] float32: the decay of a time step of 1."""
    skips: torch.Tensor | None = None
    """[H] float32: share of the values that is added to the result."""
    in_tails: torch.Tensor | None = None
    """[channels] int64: each channel's place in the tail; None: its own number."""


class DeltaGates(NamedTuple):
    """How a gated delta net's decay and beta come from a product: see
    `weft.kernels.gated_delta.delta_gates`.
    """

    rates: torch.Tensor
    """[H] float32."""
    dt_bias: torch.Tensor
    """[H] float32."""
    shared: int
    """Heads of a group."""


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
        slots: [R] int64, all different but for padding.
        cu_q_lens: [R + 1] int32: rows of each request; padding may have none.
        positions: [T] int64: of rows, complete.
        borders: [slots + 1] int64: border of each slot's newest block; written.
        ends: [slots + 1] int64: position behind each slot's last row that such a step took, which
            may be one of drafts; written.
        blocks: [R, 3] int64: the block at border b in column b / page_size mod 3; 0: there is none
            to be written.
        page_size: Token positions a page.
    """
    if slots.is_cuda:
        from weft.kernels.gpu import slot_states as gpu

        given = slots, cu_q_lens, positions, borders, ends, blocks
        return SlotRows(gpu.plan(*given, page_size))
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
        form: The layer.
        rows: Requests and their rows.
        memory: Rings get the new rows, keys and updates; blocks that `rows` names are written.
        inputs: For each part of the ring, [T, *shape].

    Returns:
        [T, H, Dv] of the dtype of the first part; zeros for rows of no request.
    """
    from weft.kernels.gpu import slot_states as gpu

    return gpu.step_heads(form, rows.plan, memory, inputs)


def step_delta(
    form: HeadForm,
    gates: DeltaGates,
    rows: SlotRows,
    memory: LayerMemory,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """`step_heads` of a gated delta net, whose gates are computed on the way.

    Args:
        form: The layer, with decays of heads, and without a bias of the convolution.
        gates: The same.
        rows: As for `step_heads`.
        memory: The same.
        inputs: The convolution's, [T, channels] or [T, Hk, channels of a key head] in any steps
            from head to head, of the dtype of the ring; and the product of the gates, [T, 2 * H].

    Returns:
        [T, H, Dv] of the dtype of the first input; zeros for rows of no request.
    """
    from weft.kernels.gpu import delta_steps as gpu

    return gpu.step_delta(form, gates, rows.plan, memory, inputs)


def step_conv(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: SlotRows,
    memory: LayerMemory,
    x: torch.Tensor,
) -> torch.Tensor:
    """Takes rows through a short convolution, the whole state of a layer.

    Args:
        weight: [taps, channels] float32.
        bias: [channels] float32, or None.
        rows: Requests and their rows.
        memory: The ring has x, [channels]; blocks have its tail, [channels, taps - 1].
        x: [T, channels].

    Returns:
        [T, channels] of the dtype of `x`; zeros for rows of no request.
    """
    from weft.kernels.gpu import slot_states as gpu

    return gpu.step_conv(weight, bias, rows.plan, memory, x)
