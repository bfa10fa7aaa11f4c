"""The plan of a step: columns for requests that get one token each, items for all other requests.

The running requests of a large batch, often hundreds, are treated alike in every step. They are
kept in columns, so that Python touches a single request only when it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from weft.contract.arrays import NO_NUMBERS, BoolArray, Float32Array, Int64Array
from weft.contract.request import TokenLogprob
from weft.contract.tasks import PoolingParams
from weft.engine.base.drafts import DraftShape, LaterDrafts
from weft.engine.requests.companions import DecodeRows, StepRows
from weft.engine.requests.request import Request
from weft.engine.scheduler.columns import RequestColumns


class PlanItem(NamedTuple):
    """Tokens [start, start + num_tokens) of one request in a step."""

    request: Request
    start: int
    num_tokens: int
    draws: bool
    """Whether a token is sampled from the last row."""
    has_lead: bool = False
    """Whether the token before `start` is computed again because a draft needs its hidden state.
    Its KV is already there.
    """


NO_DRAFTS = DraftShape.chain(0)


class VerifyItem(NamedTuple):
    """A RUNNING request that brings its last token and the drafts that follow it."""

    request: Request
    start: int
    """Position of the last token. While another step verifies drafts of the request, only the
    device knows this position, and the field has the largest possible one.
    """
    max_drafts: int
    """Number of drafts for which pages are reserved."""
    tree: DraftShape | None = None
    """Shape of the step's trees, no deeper than the number of drafts that may be accepted; None:
    chains.
    """

    @property
    def max_accepted(self) -> int:
        """Most drafts that can be accepted in the step."""
        return self.max_drafts if self.tree is None else min(self.max_drafts, self.tree.depth)

    @property
    def starts_late(self) -> bool:
        """Whether its start depends on a step under way. Valid once its own step has begun."""
        return self.request.num_verifying > (self.max_accepted > 0)


class Scored(Protocol):
    """A request of a step whose prompt's log-probabilities are wanted."""

    @property
    def request(self) -> int: ...


class LaterScores(Protocol):
    """Log-probabilities of a step's prompt tokens, which the device may still be computing."""

    def wait(self) -> Sequence[tuple[Scored, list[TokenLogprob]]]:
        """Waits for the log-probabilities: a list for each chunk, with one entry for each of its
        tokens.
        """
        ...


class Pooled(Protocol):
    """A request of a step of whose prompt vectors are wanted."""

    @property
    def request(self) -> int: ...

    @property
    def pool(self) -> PoolingParams: ...

    @property
    def is_last(self) -> bool: ...


class LaterVectors(Protocol):
    """Vectors of a step's prompts, which the device may still be computing."""

    def wait(self) -> Sequence[tuple[Pooled, Float32Array]]:
        """Waits for the vectors: [n, width], one for each prompt or for each token of a chunk."""
        ...


class Run(NamedTuple):
    """Tokens sampled in one step for a request with drafts: at least one, unless the request
    failed.
    """

    request: Request
    tokens: list[int]
    """Sampled tokens. All but the last equal the drafts in their places."""
    logprobs: list[TokenLogprob | None]
    """Log-probabilities of `tokens`; empty if no request of the step wants any."""
    num_drafts: int
    """Number of drafts that were verified."""
    is_tree: bool = False
    """Whether the drafts formed a tree, so that several could follow one token."""


class Plan:
    """The work of a step. Iterating yields all of it as items, which is slow for large batches.

    Rows of a step are in this order: decodes, requests with drafts, chunks.

    Args:
        decodes: RUNNING requests. Each brings its last sampled token, which only the device may
            know, and gets the next one.
        slots: [len(decodes)], slots of these requests.
        starts: [len(decodes)], positions of the tokens that they bring.
        chunks: Pieces of prompts; their rows come last.
    """

    def __init__(
        self,
        decodes: Sequence[Request] = (),
        slots: Int64Array = NO_NUMBERS,
        starts: Int64Array = NO_NUMBERS,
        chunks: Sequence[PlanItem] = (),
    ) -> None:
        self.decodes = decodes
        self.slots = slots
        self.starts = starts
        self.chunks = chunks
        self.verifies: Sequence[VerifyItem] = ()
        self.drafts: Sequence[Sequence[int]] = ()
        """Drafts of each of `verifies`, set when the step begins; some may be empty."""
        self.columns: RequestColumns | None = None
        """Columns of `decodes`, if the scheduler planned them as columns."""
        self.is_late: BoolArray | None = None
        """[len(decodes)]: whether a step under way verifies drafts of the request. Only the device
        then knows its position, and `starts` has the largest possible one. None: no request has
        such drafts.
        """
        self.scores: LaterScores | None = None
        """Log-probabilities of prompts, set when the step begins; None: no chunk wants any."""
        self.vectors: LaterVectors | None = None
        """Vectors of prompts, set when the step begins; None: no chunk wants any."""
        self.waits_for_layers = False
        """Whether the step waited for pages that were being loaded, so that its duration says
        little about what it computed. Set when the step begins.
        """
        self.drafting_s = 0.0
        """Seconds that drafting took before the step. Captured chains are launched with the step
        and take almost no time here.
        """

    def __len__(self) -> int:
        return len(self.decodes) + len(self.verifies) + len(self.chunks)

    def __iter__(self) -> Iterator[PlanItem]:
        for request, start in zip(self.decodes, self.starts.tolist(), strict=True):
            yield PlanItem(request, start, 1, True)
        yield from self.pieces()

    def pieces(self) -> Iterator[PlanItem]:
        """Items of the requests with drafts, then the chunks."""
        for request, start, max_drafts, _ in self.verifies:
            yield PlanItem(request, start, 1 + max_drafts, True)
        yield from self.chunks

    @property
    def has_trees(self) -> bool:
        """Whether the drafts may form trees."""
        return bool(self.verifies) and self.verifies[0].tree is not None

    @property
    def most_accepted(self) -> list[int]:
        """`VerifyItem.max_accepted` of each of `verifies`."""
        if not self.verifies:
            return []
        if self.has_trees:
            return [item.max_accepted for item in self.verifies]
        return [item.max_drafts for item in self.verifies]

    @property
    def draft_counts(self) -> Sequence[int]:
        """Number of drafts of each of `verifies`. Does not wait for the drafts themselves."""
        if isinstance(self.drafts, LaterDrafts):
            return self.drafts.counts
        return [len(drafts) for drafts in self.drafts]

    @property
    def num_chunk_tokens(self) -> int:
        """Number of prompt tokens."""
        return sum([item.num_tokens for item in self.chunks]) if self.chunks else 0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, if each request gets the most drafts it may have."""
        num_drafts = sum(item.max_drafts for item in self.verifies)
        return len(self.decodes) + len(self.verifies) + num_drafts + self.num_chunk_tokens

    @property
    def drawing_chunks(self) -> list[PlanItem]:
        """Chunks whose last row yields a token."""
        return [item for item in self.chunks if item.draws]

    def companion_rows(self) -> StepRows:
        """The step's requests, as companions take them."""
        verifies = [(item.request, item.start + 1, item.starts_late) for item in self.verifies]
        chunks = [(item.request, item.start, item.num_tokens) for item in self.chunks]
        of_items = [request.slot for request, *_ in (*verifies, *chunks)]
        slots = np.concatenate([self.slots, np.array(of_items, np.int64)])
        decodes = DecodeRows(self.decodes, self.starts, self.is_late)
        return StepRows(slots, decodes, verifies, chunks)
