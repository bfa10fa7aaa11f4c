"""Layout of a padded ragged step's arrays, one after another in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.memory.kv_memory import NULL_PAGE
from weft.engine.runner.step import ALL_BEFORE, StepArrays, StepRequests
from weft.kernels.step_requests import StepColumns

NOTHING = -1
"""Padding of `sources`, `owners` and `verify_rows`."""


@dataclass(frozen=True, slots=True)
class RaggedColumns:
    """The layout of steps padded to this many rows, requests and rows of logits."""

    num_tokens: int
    max_requests: int
    max_logits: int
    max_drafts: int = 0
    """Most drafts of a request that the step verifies."""
    has_trees: bool = False
    """Whether rows may form trees, which adds a column for `ForwardBatch.ancestors`."""
    has_requests: bool = False
    """Whether a step may also be given by its requests alone, in a column before all others."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all columns."""
        return 8 * sum(self._wide) + 4 * (2 * self.max_requests + 1)

    @property
    def _wide(self) -> list[int]:
        """Lengths of the int64 columns, in the order of `StepColumns`."""
        tokens, logits = self.num_tokens, self.max_logits
        verified = self.max_requests * (1 + self.max_drafts) if self.max_drafts else 0
        of_trees = tokens if self.has_trees else 0
        columns = [*[tokens] * 3, self.max_requests, *[logits] * 4, verified, of_trees]
        return [self.requests_size, *columns]

    @property
    def requests_size(self) -> int:
        """Length of the column that gives a step by its requests; 0 if there is none."""
        return 1 + 3 * self.max_requests if self.has_requests else 0

    def views(self, flat: torch.Tensor) -> StepColumns:
        """The columns as views of `flat`, [num_bytes] uint8, aligned to 8 bytes."""
        sizes, requests = self._wide, self.max_requests
        at = 8 * sum(sizes)
        given, *wide, verified, ancestors = torch.split(flat[:at].view(torch.int64), sizes)
        narrow = torch.split(flat[at : self.num_bytes].view(torch.int32), [requests + 1, requests])
        of_trees = ancestors if self.has_trees else None
        verify_rows = verified.view(-1, 1 + self.max_drafts)
        requests_of = given if self.has_requests else None
        return StepColumns._make((requests_of, *wide, verify_rows, of_trees, *narrow))

    def write(
        self, host: npt.NDArray[np.uint8], arrays: StepArrays, null_row: int, page_size: int
    ) -> None:
        """Writes a step's arrays into the buffer.

        Rows of no request write to the null page at position 0; requests that do not exist bring
        no row; logits that are not wanted are those of the first row, drawn for the dummy slot.

        Args:
            host: At least [num_bytes].
            arrays: The step; no larger than the layout.
            null_row: Row of the page table that names the null page only, and the dummy slot.
            page_size: Token positions a page.
        """
        assert self.has_trees or arrays.ancestors is None
        sizes, requests = self._wide, self.max_requests
        at = 8 * sum(sizes)
        wide = np.split(host[:at].view(np.int64), np.cumsum(sizes)[:-1])
        given, *columns, verified, ancestors = wide
        given[:1] = 0
        narrow = host[at : self.num_bytes].view(np.int32)
        values: tuple[tuple[npt.NDArray[Any], npt.NDArray[Any], int], ...] = (
            *zip(
                columns,
                (arrays.token_ids, arrays.positions, arrays.slots, arrays.rows, arrays.logits_rows),
                (0, 0, NULL_PAGE * page_size, null_row, 0),
                strict=False,
            ),
            (columns[5], arrays.drawing_slots, null_row),
            (columns[6], arrays.sources, NOTHING),
            (columns[7], arrays.owners, NOTHING),
            (narrow[: requests + 1], arrays.cu_q_lens, int(arrays.cu_q_lens[-1])),
            (narrow[requests + 1 :], arrays.kv_lens, 0),
        )
        for column, value, padding in values:
            column[: len(value)] = value
            column[len(value) :] = padding
        verified[:] = NOTHING
        if arrays.verify_rows is not None:
            count, width = arrays.verify_rows.shape
            verified.reshape(-1, 1 + self.max_drafts)[:count, :width] = arrays.verify_rows
        ancestors[:] = ALL_BEFORE
        if arrays.ancestors is not None:
            ancestors[: len(arrays.ancestors)] = arrays.ancestors

    def write_requests(
        self, host: npt.NDArray[np.uint8], requests: StepRequests, null_row: int
    ) -> int:
        """Writes a step given by its requests; returns the bytes used.

        Args:
            host: At least [num_bytes].
            requests: No more than the layout has room for.
            null_row: See `write`.
        """
        assert self.has_requests
        used = 8 * self.requests_size
        given, count = host[:used].view(np.int64), len(requests.slots)
        given[0] = 1
        columns = given[1:].reshape(3, self.max_requests)
        for column, values in zip(columns, requests[:3], strict=True):
            column[:count] = values
        columns[:, count:] = ((null_row,), (0,), (0,))
        return used
