"""Layout of a padded step's LoRA inputs in one buffer that graphs read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from weft.contract.arrays import Int32Array
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import NO_SLOT, LoraSegments


@dataclass(frozen=True, slots=True)
class LoraColumns:
    """The layout of steps padded to so many tokens and segments: int32 columns."""

    num_tokens: int
    num_segments: int

    @classmethod
    def of(cls, num_tokens: int, max_slots: int) -> LoraColumns:
        """The layout for steps of this many tokens, each with one of `max_slots` adapter slots."""
        return cls(num_tokens, min(num_tokens, max_slots))

    @property
    def num_bytes(self) -> int:
        return 4 * sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [*[self.num_tokens] * 3, self.num_segments + 1, self.num_segments]

    def views(self, flat: torch.Tensor) -> LoraSegments:
        """The columns as views of `flat`, at least [num_bytes] uint8, aligned to 4 bytes."""
        return LoraSegments(*torch.split(flat[: self.num_bytes].view(torch.int32), self._sizes))

    def write(self, host: npt.NDArray[np.uint8], token_slots: Int32Array) -> None:
        """Writes the adapter slots of a step, [T], into at least [num_bytes] bytes. Padding rows
        have no adapter.
        """
        padded = np.full(self.num_tokens, NO_SLOT, np.int32)
        padded[: len(token_slots)] = token_slots
        columns = np.split(host[: self.num_bytes].view(np.int32), np.cumsum(self._sizes[:-1]))
        for column, values in zip(columns, sort_tokens(padded, self.num_segments), strict=True):
            column[:] = values
