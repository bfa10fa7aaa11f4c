"""Layout of a padded ragged step's arrays, one after another in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.executor.encodings import ALL_BEFORE, StepArrays
from weft.engine.executor.step_input import StepInput
from weft.kernels.ops.step_requests.spec import StepColumns
from weft.pages.memory.page_memory import NULL_PAGE

_FEW_PROMPTS, _LEAST_ROWS = 8, 8
"""Prompts that any step has room for, and the rows for which it has room for one more. Attention
launches programs for as many prompts as there may be: on an H200 a step of 64 decodes of an 8B and
32 rows of prompts took 1.6 times as long as the decodes where each of 256 requests might be one.
"""
NOTHING = -1
"""Padding of `sources`, `owners` and `verify_rows`."""


def requests_size(num_requests: int) -> int:
    """Length of the int64 column that describes a step by its requests: a flag whether it does, and
    four values per request.
    """
    return 1 + 4 * num_requests


def write_requests(
    host: npt.NDArray[np.uint8], requests: StepInput, num_requests: int, null_row: int
) -> int:
    """Writes the column that describes a step by its requests; returns the bytes used.

    Args:
        host: At least 8 * `requests_size` bytes.
        num_requests: Number of requests that the column is padded to.
        null_row: The dummy slot: a row of the page table that names only the null page.
    """
    used, count = 8 * requests_size(num_requests), len(requests.slots)
    given = host[:used].view(np.int64)
    given[0] = 1
    columns = given[1:].reshape(4, num_requests)
    assert requests.draft_limits is not None, "the host knows tokens of the step"
    values_of = requests.slots, requests.starts, requests.counts, requests.draft_limits
    for column, values in zip(columns, values_of, strict=True):
        column[:count] = values
    if count < num_requests:
        columns[:, count:] = ((null_row,), (0,), (0,), (1,))
    return used


@dataclass(frozen=True)
class RaggedColumns:
    """The layout of steps padded to so many rows, requests and rows of logits."""

    num_tokens: int
    max_requests: int
    max_logits: int
    max_rows: int = 1
    """Most rows of a request whose drafts the step verifies; 1: it verifies none."""
    has_trees: bool = False
    """Whether rows may form trees, which adds a column for `AttentionMetadata.ancestors`."""
    has_requests: bool = False
    """Whether a step may also be sent by its requests alone, in a column before all others."""

    @cached_property
    def num_bytes(self) -> int:
        return 8 * sum(self._wide) + 4 * (2 * self.max_requests + 2)

    @property
    def max_several(self) -> int:
        """Most requests from the first one on that brings several rows."""
        if self.max_rows > 1:
            return self.max_requests
        return min(self.max_requests, max(_FEW_PROMPTS, self.num_tokens // _LEAST_ROWS))

    @cached_property
    def _wide(self) -> list[int]:
        """Lengths of the int64 columns, in the order of `StepColumns`."""
        tokens, logits = self.num_tokens, self.max_logits
        verified = self.max_requests * self.max_rows if self.max_rows > 1 else 0
        of_trees = tokens if self.has_trees else 0
        columns = [*[tokens] * 3, self.max_requests, *[logits] * 4, verified, of_trees]
        return [requests_size(self.max_requests) if self.has_requests else 0, *columns]

    def views(self, flat: torch.Tensor) -> StepColumns:
        """The columns as views of `flat`, [num_bytes] uint8, aligned to 8 bytes."""
        sizes, requests = self._wide, self.max_requests
        at = 8 * sum(sizes)
        given, *wide, verified, ancestors = torch.split(flat[:at].view(torch.int64), sizes)
        lengths = [requests + 1, requests, 1]
        *narrow, first = torch.split(flat[at : self.num_bytes].view(torch.int32), lengths)
        of_trees = ancestors if self.has_trees else None
        verify_rows = verified.view(-1, self.max_rows)
        requests_of, several = (given, None) if self.has_requests else (None, first)
        return StepColumns._make((requests_of, *wide, verify_rows, of_trees, *narrow, several))

    def write(
        self, host: npt.NDArray[np.uint8], arrays: StepArrays, null_row: int, page_size: int
    ) -> None:
        """Writes a step's arrays into the buffer.

        Padding rows write to the null page at position 0. Padding requests have no rows. Padding
        rows of logits repeat the first row and draw for the dummy slot.

        Args:
            host: At least [num_bytes].
            null_row: The dummy slot: a row of the page table that names only the null page.
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
                (
                    arrays.token_ids,
                    arrays.positions,
                    arrays.places,
                    arrays.slots,
                    arrays.logits_rows,
                ),
                (0, 0, NULL_PAGE * page_size, null_row, 0),
                strict=False,
            ),
            (columns[5], arrays.drawing_slots, null_row),
            (columns[6], arrays.sources, NOTHING),
            (columns[7], arrays.owners, NOTHING),
            (narrow[: requests + 1], arrays.cu_q_lens, int(arrays.cu_q_lens[-1])),
            (narrow[requests + 1 : -1], arrays.kv_lens, 0),
        )
        for column, value, padding in values:
            column[: len(value)] = value
            column[len(value) :] = padding
        # Kernels begin at a request that exists, also in a step of one row each.
        narrow[-1] = min(arrays.first_several, requests - 1)
        verified[:] = NOTHING
        if arrays.verify_rows is not None:
            count, width = arrays.verify_rows.shape
            verified.reshape(-1, self.max_rows)[:count, :width] = arrays.verify_rows
        ancestors[:] = ALL_BEFORE
        if arrays.ancestors is not None:
            ancestors[: len(arrays.ancestors)] = arrays.ancestors
