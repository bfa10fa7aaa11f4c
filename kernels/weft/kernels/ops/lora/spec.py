"""Types of lora."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from weft.kernels.shared import cpu

ROW_RANK = 8
"""Ranks in a row of the pool."""

B_COLUMNS = 16
"""Columns in a block of packed B."""

NO_SLOT = 0
"""The slot of tokens without an adapter."""

EMPTY_SLOT = int(np.iinfo(np.int32).max)
"""The slot of segments without tokens; it is larger than every real slot."""

Int32Array = npt.NDArray[np.int32]

Group = (
    Literal["qkv", "o", "gate_up", "down", "router", "embed", "lm_head"]
    | Literal["state_in", "state_z", "state_gates", "state_out"]
)
"""Projections that are computed as one product. `embed` and `lm_head` have one layer, number 0."""


class HostSegments(NamedTuple):
    token_slots: Int32Array
    order: Int32Array
    ordered: Int32Array
    starts: Int32Array
    slots: Int32Array


@dataclass(frozen=True, slots=True)
class LoraSegments:
    """The adapter of each token of a step, T tokens in S segments; on the model's device."""

    token_slots: torch.Tensor
    """[T] int32: adapter slot of each token."""
    order: torch.Tensor
    """[T] int32: the tokens sorted by slot; tokens of one slot keep their order."""
    ordered: torch.Tensor
    """[T] int32: `token_slots` in that order."""
    starts: torch.Tensor
    """[S + 1] int32: where each segment begins in `order`."""
    slots: torch.Tensor
    """[S] int32, ascending: each segment's slot; EMPTY_SLOT for segments without tokens."""

    def __post_init__(self) -> None:
        tensors = (self.token_slots, self.order, self.ordered, self.starts, self.slots)
        tokens, order, ordered, starts, slots = (t.numel() for t in tensors)
        if (order, ordered, starts) != (tokens, tokens, slots + 1) or any(
            t.dtype != torch.int32 or t.dim() != 1 or not t.is_contiguous() for t in tensors
        ):
            raise ValueError(
                f"LoRA segments {[(tuple(t.shape), t.dtype) for t in tensors]} are not [T], [T], "
                "[T], [S + 1] and [S] int32, contiguous"
            )

    @classmethod
    def of(cls, host: HostSegments) -> LoraSegments:
        """Makes CPU tensors that share the arrays' memory."""
        return cls(*(torch.from_numpy(array) for array in host))

    def select(self, rows: torch.Tensor) -> LoraSegments:
        """The segments of some of the tokens, in their order; it does not wait for the device.

        Args:
            rows: [L] int64: tokens of this step.
        """
        token_slots = self.token_slots.index_select(0, rows)
        ordered, order = torch.sort(token_slots, stable=True)
        starts = self.starts.new_full((self.slots.shape[0] + 1,), rows.shape[0])
        starts[:-1] = torch.searchsorted(ordered, self.slots, out_int32=True)
        return LoraSegments(token_slots, order.to(torch.int32), ordered, starts, self.slots)


class NativeLora(NamedTuple):
    """Additions described to native operations; valid as long as this object and the tensors
    live.
    """

    described: cpu.LoraStruct
    address: int
    num_layers: int
    buffers: tuple[torch.Tensor, torch.Tensor]
    """Scratch memory of native operations."""
