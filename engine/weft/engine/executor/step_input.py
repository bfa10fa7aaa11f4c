"""The input of a step as the executor gets it: numbers by request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import NO_NUMBERS, Int32Array, Int64Array
from weft.contract.tasks import TOKEN_OUTPUTS, PoolingParams
from weft.engine.base.drafts import LaterDrafts
from weft.engine.base.state_rows import StateRows
from weft.engine.sampling.prompt_scores import ScoredRows

ON_DEVICE = -1
"""Start position that only the device knows, because it depends on how many drafts the step under
way accepts.
"""


def _nothing() -> Int64Array:
    return NO_NUMBERS


class PooledRows(NamedTuple):
    """Rows of a request whose hidden states are pooled into vectors."""

    request: int
    slot: int
    pool: PoolingParams
    prompt_length: int
    """Tokens of the whole prompt."""
    start: int
    """Position in the prompt of the first token in this step."""
    num_tokens: int
    """Tokens of the prompt in this step."""
    lead: int = 0
    """Rows ahead of these that the step computes again."""

    @property
    def is_last(self) -> bool:
        return self.start + self.num_tokens == self.prompt_length

    @property
    def is_whole(self) -> bool:
        return self.num_tokens == self.prompt_length

    @property
    def is_first(self) -> bool:
        """Whether only the first row is needed, since the step has the whole prompt and takes its
        vector there.
        """
        is_of_prompt = self.pool.output not in TOKEN_OUTPUTS
        return self.is_whole and is_of_prompt and self.pool.pooling == "first"

    @property
    def aligned(self) -> range:
        """The rows that are aligned to a clip, counted from the request's own first row."""
        first = max(self.pool.aligned_from - self.start, 0)
        return range(self.lead + min(first, self.num_tokens), self.lead + self.num_tokens)

    @property
    def wanted(self) -> range:
        """The rows that are needed, counted from the request's own first row."""
        if self.pool.output == "alignment":
            return range(0)
        if self.is_first:
            return range(self.lead, self.lead + 1)
        if self.pool.wants_all_rows:
            return range(self.lead, self.lead + self.num_tokens)
        end = self.lead + self.num_tokens
        return range(end - 1 if self.is_last else end, end)


class InsertedRows(NamedTuple):
    """Rows of a step that take a medium's row in place of their token's embedding, [M] each."""

    rows: Int64Array
    """Numbers of the rows."""
    sources: Int64Array
    """The place of each one's embedding in the memory of media."""
    ends: Int64Array | None = None
    """The position after the last one that each row attends to; None: it is the row's own."""


class TurnedRows(NamedTuple):
    """Rows of a step that are rotated by positions along several axes."""

    rows: Int64Array
    """[M]: numbers of the rows."""
    axes: Int64Array
    """[M, 3]: time, row and column."""


@dataclass(slots=True, kw_only=True)
class StepInput:
    """The requests of a step: decodes first, then requests whose drafts are verified, then chunks
    of prompts.

    R is the number of requests. A request brings rows at consecutive positions, or its last token
    followed by a tree of drafts. Its pages are in the page table.
    """

    slots: Int64Array
    """[R]."""
    starts: Int64Array
    """[R]: position of each request's first row; ON_DEVICE: only the device knows it."""
    max_starts: Int64Array
    """[R]: the largest value that `starts` can have; equal to `starts` where that is known."""
    counts: Int64Array
    """[R]: rows of each request."""
    num_decodes: int = 0
    """Requests that bring only their last token."""
    num_verified: int = 0
    """Requests that bring their last token and drafts. All of their rows draw."""
    draws: Int64Array = field(default_factory=_nothing)
    """[R - decodes - verified]: 1 if the last row of the chunk draws, else 0."""
    recomputed_rows: Int64Array = field(default_factory=_nothing)
    """[R - decodes - verified]: rows at each chunk's start whose K and V earlier steps have
    written. The step computes them again and discards their K and V.
    """
    tokens: Int64Array = field(default_factory=_nothing)
    """Tokens of the rows that the host knows, in order: first those of verified requests (unless
    the drafts are on the device), then those of chunks.
    """
    decode_tokens: Int64Array | None = None
    """[num_decodes]: the tokens that decodes bring, where the host knows them; None: the device has
    kept them.
    """
    ancestor_masks: Int64Array | None = None
    """For each row of a verified request, a mask of the rows of the request that it sees, where the
    host knows the trees (`weft.kernels.ops.attention.paged_attention`). None: drafts form chains,
    or the device knows the trees.
    """
    has_trees: bool = False
    draft_limits: Int64Array | None = None
    """[R]: first position at which a chain of drafts has no page; 1 for a request without drafts.
    None: the device makes no drafts.
    """
    pages: Int64Array | None = None
    """[R], only in a step of decodes alone: the page of each position that the device's page table
    may lack, else -1. None: the table lacks no page.
    """
    adapters: Int32Array | None = None
    """[R]: each request's slot of the LoRA tables; None: no request has an adapter."""
    drafts: LaterDrafts | None = None
    """Drafts of the verified requests on the device; None: the drafts are in `tokens`."""
    scores: Sequence[ScoredRows] = ()
    """Chunks of prompts whose log-probabilities are wanted."""
    pooled: Sequence[PooledRows] = ()
    pooled_elsewhere: Sequence[tuple[int, range]] = ()
    """Requests, and rows of each of them, of which rank 0 makes vectors and this rank does not."""
    """Chunks of prompts whose vectors are wanted."""
    waits_for_layers: bool = False
    """Whether pages of some chunk are still being loaded, layer by layer."""
    states: StateRows | None = None
    """Blocks of recurrent layers; None: the model has none."""
    inserted: InsertedRows | None = None
    """Rows that come from media; None: none do."""
    turned: TurnedRows | None = None
    """Rows whose rotations do not follow from position and slot; None: there are none."""

    is_divided: bool = False
    """Whether these are a rank's rows of a step that ranks divide by rows."""

    @property
    def has_media(self) -> bool:
        """Whether some rows come from media or are among them."""
        return self.inserted is not None or self.turned is not None

    @property
    def num_rows(self) -> int:
        return int(self.counts.sum())

    @property
    def max_count(self) -> int:
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

    def of_requests(self, requests: Sequence[int]) -> StepInput:
        """A copy with the slots and adapters of these requests; all else is the caller's to set."""
        adapters = None if self.adapters is None else self.adapters[requests]
        return replace(self, slots=self.slots[requests], adapters=adapters)

    def row_adapters(self) -> Int32Array | None:
        """[T]: the adapter slot of each row."""
        return None if self.adapters is None else np.repeat(self.adapters, self.counts)

    def rows(self) -> tuple[Int64Array, Int64Array]:
        """The slot and the largest possible position of each row, [T] each. Not for trees."""
        behind = np.arange(self.num_rows)
        firsts = np.cumsum(self.counts) - self.counts
        positions = behind + np.repeat(self.max_starts - firsts, self.counts)
        return np.repeat(self.slots, self.counts), positions
