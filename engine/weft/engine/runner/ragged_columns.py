"""Layout of a padded ragged step's arrays, one after another in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.memory.kv_memory import NULL_PAGE
from weft.engine.runner.step import ALL_BEFORE, StepArrays


@dataclass(frozen=True, slots=True)
class RaggedColumns:
    """The layout of steps padded to this many rows, requests and rows of logits: int64 columns,
    then int32 ones.
    """

    num_tokens: int
    max_requests: int
    max_logits: int
    has_trees: bool = False
    """Whether rows may form trees, which adds a column for `ForwardBatch.ancestors`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return 8 * self._num_wide + 4 * (2 * self.max_requests + 1)

    @property
    def _num_wide(self) -> int:
        of_tokens = 4 if self.has_trees else 3
        return of_tokens * self.num_tokens + self.max_requests + self.max_logits

    def views(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The columns as views of `flat`, [num_bytes] uint8, aligned to 8 bytes.

        Returns:
            token_ids, positions, slots [num_tokens], rows [max_requests], logits_rows [max_logits]
            int64; cu_q_lens [max_requests + 1], kv_lens [max_requests] int32.
        """
        at = 8 * self._num_wide
        tokens, requests = self.num_tokens, self.max_requests
        sizes = [tokens, tokens, tokens, requests, self.max_logits]
        wide = torch.split(flat[: 8 * sum(sizes)].view(torch.int64), sizes)
        narrow = torch.split(flat[at : self.num_bytes].view(torch.int32), [requests + 1, requests])
        return (*wide, *narrow)

    def ancestors(self, flat: torch.Tensor) -> torch.Tensor | None:
        """The ancestors in `flat`, [num_tokens] int64; None without trees."""
        if not self.has_trees:
            return None
        at = 8 * self._num_wide
        return flat[at - 8 * self.num_tokens : at].view(torch.int64)

    def write(
        self, host: npt.NDArray[np.uint8], arrays: StepArrays, null_row: int, page_size: int
    ) -> None:
        """Writes a step's arrays into the buffer.

        Rows of no request write to the null page at position 0; requests that do not exist bring
        no row; logits that are not wanted are those of the first row.

        Args:
            host: At least [num_bytes].
            arrays: The step; no larger than the layout.
            null_row: Row of the page table that names the null page only.
            page_size: Token positions a page.
        """
        assert self.has_trees or arrays.ancestors is None
        tokens, requests = self.num_tokens, self.max_requests
        at = 8 * self._num_wide
        sizes = [tokens, tokens, tokens, requests, self.max_logits]
        wide = np.split(host[:at].view(np.int64), np.cumsum(sizes))
        columns: list[npt.NDArray[Any]] = wide[:-1]
        columns += np.split(host[at : self.num_bytes].view(np.int32), [requests + 1])
        values: tuple[tuple[npt.NDArray[Any], int], ...] = (
            (arrays.token_ids, 0),
            (arrays.positions, 0),
            (arrays.slots, NULL_PAGE * page_size),
            (arrays.rows, null_row),
            (arrays.logits_rows, 0),
            (arrays.cu_q_lens, int(arrays.cu_q_lens[-1])),
            (arrays.kv_lens, 0),
        )
        for column, (value, padding) in zip(columns, values, strict=True):
            column[: len(value)] = value
            column[len(value) :] = padding
        if self.has_trees:
            wide[-1][:] = ALL_BEFORE
            if arrays.ancestors is not None:
                wide[-1][: len(arrays.ancestors)] = arrays.ancestors
