"""The input of a step as the executor gets it: numbers by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import NO_NUMBERS, Int32Array, Int64Array
from weft.contract.tasks import TOKEN_OUTPUTS, Pool
from weft.engine.base.drafts import LaterDrafts
from weft.engine.base.state_rows import StateRows

ON_DEVICE = -1
"""Start position that only the device knows: the end of the step under way."""


def _nothing() -> Int64Array:
    return NO_NUMBERS


class ScoredRows(NamedTuple):
    """Rows of a request that are scored: the prompt's next token is known behind each of them."""

    request: int
    """Number of the request in the step."""
    num_top: int
    """Alternatives wanted for each token."""
    first_row: int
    """The first of these rows, counted from the request's own first one."""
    tokens: list[int]
    """The prompt's token behind each of them."""


class PooledRows(NamedTuple):
    """Rows of a request of whose hidden states vectors are made."""

    request: int
    """Number of the request in the step."""
    slot: int
    """Slot of the request."""
    pool: Pool
    prompt_length: int
    """Tokens of the whole prompt."""
    start: int
    """Position in the prompt of the first token that the request brings."""
    num_tokens: int
    """Tokens that it brings."""
    lead: int = 0
    """Rows ahead of these, which are run again."""

    @property
    def is_last(self) -> bool:
        """Whether the prompt ends here."""
        return self.start + self.num_tokens == self.prompt_length

    @property
    def is_whole(self) -> bool:
        """Whether the step has all of the prompt."""
        return self.num_tokens == self.prompt_length

    @property
    def is_first(self) -> bool:
        """Whether the first of these rows, all of the prompt, is the only one that is needed."""
        is_of_prompt = self.pool.output not in TOKEN_OUTPUTS
        return self.is_whole and is_of_prompt and self.pool.pooling == "first"

    @property
    def wanted(self) -> range:
        """The rows that are needed, counted from the request's own first one."""
        if self.is_first:
            return range(self.lead, self.lead + 1)
        if self.pool.wants_all_rows:
            return range(self.lead, self.lead + self.num_tokens)
        end = self.lead + self.num_tokens
        return range(end - 1 if self.is_last else end, end)


@dataclass(slots=True, kw_only=True)
class StepInput:
    """The requests of a step: decodes first, then requests whose drafts are verified, then pieces
    of prompts.

    R = requests. A request brings rows at consecutive positions, or its last token and a tree of
    drafts behind it. Its pages are in the page table.
    """

    slots: Int64Array
    """Slot of each request, [R]."""
    starts: Int64Array
    """Position of each request's first row, [R]; LATE: only the device knows it."""
    max_starts: Int64Array
    """The largest value that `starts` can have, [R]; equal to `starts` where that is known."""
    counts: Int64Array
    """Rows of each request, [R]."""
    num_decodes: int = 0
    """Number of requests that bring only the token that they drew last, which the device keeps."""
    num_verified: int = 0
    """Number of requests that bring their last token and drafts; all of their rows draw."""
    draws: Int64Array = field(default_factory=_nothing)
    """[R - decodes - verified]: whether the last row of each piece of a prompt draws, 0 or 1."""
    recomputed_rows: Int64Array = field(default_factory=_nothing)
    """[R - decodes - verified]: number of each piece's first rows that are computed again because
    only their K and V are known. They write no K and V.
    """
    tokens: Int64Array = field(default_factory=_nothing)
    """Tokens of the rows that the host knows, in order: those of verified requests (unless the
    drafts are on the device), then those of pieces.
    """
    ancestor_masks: Int64Array | None = None
    """For each row of a verified request, the rows of the request that it sees, where the host
    knows the trees
    (`weft.kernels.attention.paged_attention`). None: chains, or the device knows the trees.
    """
    has_trees: bool = False
    """Whether drafts form trees."""
    draft_limits: Int64Array | None = None
    """[R]: first position at which a chain of drafts has no page; 1 for a request without drafts.
    None: no drafts are made on the device.
    """
    pages: Int64Array | None = None
    """[R], in a step of decodes alone: the page of each position that the device's page table may
    lack, else -1. None: the table lacks no page.
    """
    adapters: Int32Array | None = None
    """Each request's slot of the LoRA tables, [R]; None: no request has an adapter."""
    drafts: LaterDrafts | None = None
    """Drafts of the verified requests on the device; None: the drafts are in `tokens`."""
    scores: Sequence[ScoredRows] = ()
    """Pieces of prompts whose log-probabilities are wanted."""
    pooled: Sequence[PooledRows] = ()
    """Pieces of prompts of which vectors are wanted."""
    states: StateRows | None = None
    """Blocks of recurrent layers; None: the model has none."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return int(self.counts.sum())

    @property
    def max_count(self) -> int:
        """Most rows of a request."""
        return int(self.counts.max(initial=0))

    @property
    def is_decodes(self) -> bool:
        """Whether each request brings one token, at a position that the host knows."""
        count = len(self.slots)
        return 0 < self.num_decodes == count and (
            self.starts is self.max_starts or not self.is_late
        )

    @property
    def is_late(self) -> bool:
        """Whether only the device knows where some request begins."""
        return self.starts is not self.max_starts and bool((self.starts == ON_DEVICE).any())

    @property
    def is_by_requests(self) -> bool:
        """Whether the step can be sent by its requests alone, since the device has the tokens of
        all rows.
        """
        return self.draft_limits is not None

    def row_adapters(self) -> Int32Array | None:
        """The adapter slot of each row, [T]."""
        return None if self.adapters is None else np.repeat(self.adapters, self.counts)

    def rows(self) -> tuple[Int64Array, Int64Array]:
        """The slot of each row, [T], and its largest possible position, [T]; for chains only."""
        behind = np.arange(self.num_rows)
        firsts = np.cumsum(self.counts) - self.counts
        positions = behind + np.repeat(self.max_starts - firsts, self.counts)
        return np.repeat(self.slots, self.counts), positions
