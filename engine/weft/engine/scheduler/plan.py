"""The plan of a step: columns for requests that get one token each, items for the others.

The hundreds of running requests of a large batch are all treated alike, step after step. They are
kept in columns, so that Python touches a single request only when it changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from weft.contract.arrays import NO_NUMBERS, BoolArray, Float32Array, Int64Array
from weft.contract.request import TokenLogprob
from weft.contract.tasks import Pool
from weft.engine.base.drafts import DraftShape, LaterDrafts
from weft.engine.scheduler.columns import RequestColumns
from weft.engine.scheduler.state import Request


class PlanItem(NamedTuple):
    """Tokens [start, start + num_tokens) of one request in a step."""

    request: Request
    start: int
    num_tokens: int
    draws: bool
    """Whether a token is drawn from the last row."""
    has_lead: bool = False
    """Whether the token before `start` is run again because a draft needs its state; its KV is
    already there.
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
    """Shape of the step's trees, no deeper than the drafts that may be accepted; None: chains."""

    @property
    def max_accepted(self) -> int:
        """Most drafts that can be accepted at once."""
        return self.max_drafts if self.tree is None else min(self.max_drafts, self.tree.depth)

    @property
    def starts_late(self) -> bool:
        """Whether its start depends on a step under way. Valid once its own step has begun."""
        return self.request.num_verifying > (self.max_accepted > 0)


class Scored(Protocol):
    """Rows of a request whose prompt's log-probabilities were wanted."""

    @property
    def request(self) -> int:
        """Number of the request in the step."""
        ...


class LaterScores(Protocol):
    """Log-probabilities of a step's prompt tokens, which may still be computed."""

    def wait(self) -> Sequence[tuple[Scored, list[TokenLogprob]]]:
        """Waits for the log-probabilities: a list for each chunk, with one entry for each of its
        tokens.
        """
        ...


class Pooled(Protocol):
    """Rows of a request of which vectors were wanted."""

    @property
    def request(self) -> int:
        """Number of the request in the step."""
        ...

    @property
    def pool(self) -> Pool:
        """The vectors that are wanted of the rows."""
        ...

    @property
    def is_last(self) -> bool:
        """Whether its prompt ended with the step."""
        ...


class LaterVectors(Protocol):
    """Vectors of a step's prompts, which may still be computed."""

    def wait(self) -> Sequence[tuple[Pooled, Float32Array]]:
        """Waits for them: [n, width] of each prompt, or of a piece's tokens."""
        ...


class Run(NamedTuple):
    """Tokens that a request with drafts drew in one step: at least one unless it failed."""

    request: Request
    tokens: list[int]
    """Drawn tokens; each but the last equals the draft in its place."""
    logprobs: list[TokenLogprob | None]
    """Log-probabilities of these; empty if no request of the step wants any."""
    num_drafts: int
    """Number of drafts that were verified."""
    is_tree: bool = False
    """Whether several of the drafts could follow one token."""


class Plan:
    """The work of a step; iterating yields all of it as items, which is slow for large batches.

    Rows of a step are in this order: decodes, requests with drafts, chunks.

    Args:
        decodes: RUNNING requests. Each brings the token that it drew last and draws the next one.
            The last token may be known to the device alone.
        slots: [len(decodes)], slots of these requests.
        starts: [len(decodes)], positions of the tokens that they bring.
        chunks: Pieces of prompts; their rows come after those of the decodes.
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
        """Requests with drafts."""
        self.drafts: Sequence[Sequence[int]] = ()
        """Drafts of each of `verifies`, once the step has begun; some may be empty."""
        self.columns: RequestColumns | None = None
        """Columns of `decodes`, as the scheduler plans them."""
        self.is_late: BoolArray | None = None
        """[len(decodes)]: whether a step under way verifies drafts of the request. Only the device
        then knows its position, and `starts` has the largest possible one. None: of no request.
        """
        self.scores: LaterScores | None = None
        """Log-probabilities of prompts, once the step has begun; None: no chunk wants any."""
        self.vectors: LaterVectors | None = None
        """Vectors of prompts, once the step has begun; None: no chunk wants any."""
        self.drafting_s = 0.0
        """Seconds that drafting took before the step. Captured chains are launched with the step
        and take almost no time here.
        """

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.decodes) + len(self.verifies) + len(self.chunks)

    def __iter__(self) -> Iterator[PlanItem]:
        for request, start in zip(self.decodes, self.starts.tolist(), strict=True):
            yield PlanItem(request, start, 1, True)
        yield from self.pieces()

    def pieces(self) -> Iterator[PlanItem]:
        """All but the decodes."""
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
        """Number of drafts of each of `verifies`; does not wait."""
        if isinstance(self.drafts, LaterDrafts):
            return self.drafts.counts
        return [len(drafts) for drafts in self.drafts]

    @property
    def num_chunk_tokens(self) -> int:
        """Number of new tokens in the chunks."""
        return sum([item.num_tokens for item in self.chunks]) if self.chunks else 0

    @property
    def num_tokens(self) -> int:
        """Number of new tokens, counting the most drafts there may be."""
        num_drafts = sum(item.max_drafts for item in self.verifies)
        return len(self.decodes) + len(self.verifies) + num_drafts + self.num_chunk_tokens

    @property
    def drawing_chunks(self) -> list[PlanItem]:
        """Chunks from whose last row a token is drawn."""
        return [item for item in self.chunks if item.draws]
