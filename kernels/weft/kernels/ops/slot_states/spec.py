"""Types of slot states."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SlotRows(NamedTuple):
    """The first R requests of a step, each of which has few rows."""

    plan: torch.Tensor
    """[R, 9] int64. Columns: slot, first row of the step, number of rows, position of that row,
    border, block of that border, border that is written (-1: none), its block, and the first
    position whose key and update are not in the ring.
    """


class LayerMemory(NamedTuple):
    """The memory in which one layer keeps the states of requests."""

    blocks: tuple[torch.Tensor, ...]
    """[num_blocks, *shape] of each part; contiguous within a block."""
    rings: tuple[torch.Tensor, ...]
    """[slots + 1, ring_rows, *shape] of each part; contiguous within a row."""
    found: tuple[torch.Tensor, ...] = ()
    """Keys, [slots + 1, ring_rows, heads of keys, Dk], and updates, [slots + 1, ring_rows, H, Dv],
    of rows that were taken; for layers with heads.
    """


class Channels(NamedTuple):
    """Where heads lie among the channels of a convolution."""

    first: int
    """First channel of the first head."""
    step: int
    """Channels from one head of keys to the next."""


class HeadForm(NamedTuple):
    """A layer whose heads have a matrix as state: the gated delta rule, or Mamba 2's.

    Parts of its ring: first the convolution's input; second the logarithm of the decay, [H] or [H,
    Dk], or with `rates` time steps, [H]; for the delta rule beta, [H], third. Blocks hold states,
    [H, Dk, Dv] float32, and the convolution's tail, [channels, taps - 1], whose channels may be in
    another order (`in_tails`).
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
    """Heads that share a head of keys; their values are adjacent."""
    key_dim: int
    value_dim: int
    scale: float = 1.0
    """Factor on queries."""
    is_unit: bool = False
    """Whether keys and queries are normalised to length 1."""
    rates: torch.Tensor | None = None
    """[H] float32: decay of a time step of 1."""
    skips: torch.Tensor | None = None
    """[H] float32: share of the values that is added to the result."""
    in_tails: torch.Tensor | None = None
    """[channels] int64: each channel's place in the tail; None: the tail has the same order."""


class DeltaGates(NamedTuple):
    """How `weft.kernels.ops.gated_delta.delta_gates` makes a gated delta net's decay and beta of a
    product.
    """

    rates: torch.Tensor
    """[H] float32."""
    dt_bias: torch.Tensor
    """[H] float32."""
    shared: int
    """Heads of a group."""
