"""What one step computes: columns for requests that get one token each, items for the others.

The hundreds of running requests of a large batch are all treated alike, step after step. They are
kept in columns, so that Python touches one of them only where something about it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt
from weft.engine.request import TokenLogprob
from weft.engine.scheduler.state import Request

Int64Array = npt.NDArray[np.int64]
NO_NUMBERS: Int64Array = np.zeros(0, np.int64)


class PlanItem(NamedTuple):
    """Tokens [start, start + num_tokens) of one request in a step."""

    request: Request
    start: int
    num_tokens: int
    samples: bool
    """A token is drawn from the last row."""
    has_lead: bool = False
    """The token before `start` comes too, for what a draft needs of it; its KV is there already."""


class DraftShape(NamedTuple):
    """What requests may bring to a step behind their last tokens."""

    num_drafts: int
    """Of each request."""
    depth: int
    """So many of them may be right at once; of a chain all."""
    width: int = 1
    """Of a tree: so many nodes of a level get as many children each. 1: a chain."""

    @classmethod
    def chain(cls, num_drafts: int) -> DraftShape:
        """Drafts of which each follows the one before."""
        return cls(num_drafts, num_drafts)

    @property
    def is_tree(self) -> bool:
        """Several drafts may follow one token."""
        return self.width > 1

    @property
    def num_grown(self) -> int:
        """Nodes of which those of a tree are chosen."""
        return self.width + self.width * self.width * (self.depth - 1)

    @property
    def num_places(self) -> int:
        """Behind the last token, where K and V of drafts are written."""
        return max(self.num_drafts, self.width * (self.depth - 1)) if self.is_tree else self.depth


NO_DRAFTS = DraftShape.chain(0)


class VerifyItem(NamedTuple):
    """A RUNNING request that brings its last token and drafts of those that may follow it."""

    request: Request
    start: int
    """Position of the last token; while another step verifies drafts of the request, which only the
    device knows the outcome of, the last that it may have."""
    max_drafts: int
    """For so many there are pages."""
    tree: DraftShape | None = None
    """The step's drafts are trees of this shape, which is no deeper than drafts may be accepted;
    None: chains."""

    @property
    def max_accepted(self) -> int:
        """So many drafts may be right at once."""
        return self.max_drafts if self.tree is None else min(self.max_drafts, self.tree.depth)


class DraftTree(list[int]):
    """Drafts of one request that form a tree, parents before children.

    Row 0 of the request is its last token, row i + 1 its draft i.

    Args:
        tokens: Of the drafts.
        parents: Of each, the row that it follows.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__(tokens)
        self.parents = parents


def parents_of(drafts: Sequence[int]) -> Sequence[int]:
    """Of each draft of a request, the row that it follows."""
    return drafts.parents if isinstance(drafts, DraftTree) else range(len(drafts))


class LaterDrafts(Sequence[list[int]]):
    """Drafts of requests that lie on the device, where they may still be made.

    Args:
        counts: Of each request.
        fetch: Waits for them.
    """

    def __init__(self, counts: Sequence[int], fetch: Callable[[], list[list[int]]]) -> None:
        self.counts = counts
        self._fetch = fetch
        self._fetched: list[list[int]] | None = None

    def __len__(self) -> int:
        """Requests."""
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        """Those of a request; waits for all of them."""
        if self._fetched is None:
            self._fetched = self._fetch()
        return self._fetched[index]


class Run(NamedTuple):
    """What a request with drafts drew in one step: at least one token unless it failed."""

    request: Request
    tokens: list[int]
    """Each but the last is what was drafted in its place."""
    logprobs: list[TokenLogprob | None]
    num_drafts: int
    """That were verified."""
    is_tree: bool = False
    """Several of them may have followed one token."""


class Plan:
    """The work of a step; iterating gives all of it as items, which is slow for large batches.

    In a step come the decodes first, then what is verified, then the chunks.

    Args:
        decodes: RUNNING requests. Each brings the token that it drew last, which may not be known
            yet but to the device, and draws the next one.
        slots: [len(decodes)], theirs.
        starts: [len(decodes)], the positions of the tokens that they bring.
        chunks: Pieces of prompts, which come behind them.
        adapter_slots: [len(decodes)], of their adapters; None: none of them has one.
    """

    def __init__(
        self,
        decodes: Sequence[Request] = (),
        slots: Int64Array = NO_NUMBERS,
        starts: Int64Array = NO_NUMBERS,
        chunks: Sequence[PlanItem] = (),
        adapter_slots: Int64Array | None = None,
    ) -> None:
        self.decodes = decodes
        self.slots = slots
        self.starts = starts
        self.chunks = chunks
        self.adapter_slots = adapter_slots
        self.verifies: Sequence[VerifyItem] = ()
        """Requests with drafts."""
        self.drafts: Sequence[Sequence[int]] = ()
        """Of each of `verifies`, once the step has begun; some may have none."""
        self.drafting_s = 0.0
        """What making these took of the step's time; of captured chains, launching them."""

    def __len__(self) -> int:
        """Requests."""
        return len(self.decodes) + len(self.verifies) + len(self.chunks)

    def __iter__(self) -> Iterator[PlanItem]:
        for request, start in zip(self.decodes, self.starts.tolist(), strict=True):
            yield PlanItem(request, start, 1, True)
        for request, start, max_drafts, _ in self.verifies:
            yield PlanItem(request, start, 1 + max_drafts, True)
        yield from self.chunks

    @property
    def has_trees(self) -> bool:
        """What is verified may be trees."""
        return bool(self.verifies) and self.verifies[0].tree is not None

    @property
    def draft_counts(self) -> Sequence[int]:
        """Of each of `verifies`; waits for nothing."""
        if isinstance(self.drafts, LaterDrafts):
            return self.drafts.counts
        return [len(drafts) for drafts in self.drafts]

    @property
    def num_chunk_tokens(self) -> int:
        """New tokens of the chunks."""
        return sum(item.num_tokens for item in self.chunks)

    @property
    def num_tokens(self) -> int:
        """New tokens of all, with as many drafts as there may be."""
        num_drafts = sum(item.max_drafts for item in self.verifies)
        return len(self.decodes) + len(self.verifies) + num_drafts + self.num_chunk_tokens

    @property
    def drawing_chunks(self) -> list[PlanItem]:
        """Those from whose last row a token is drawn."""
        return [item for item in self.chunks if item.samples]


class RunningColumns(NamedTuple):
    """RUNNING requests, and what does not change while they run."""

    requests: Sequence[Request]
    slots: Int64Array
    ends: Int64Array
    """Position of the last token that each may have; nothing follows it."""
    adapter_slots: Int64Array | None
    """None: none of them has an adapter."""

    @classmethod
    def of(cls, running: Sequence[Request]) -> RunningColumns:
        """The requests as they are now."""
        adapter_slots = [request.adapter_slot for request in running]
        return cls(
            list(running),
            np.array([request.slot for request in running], np.int64),
            np.array([r.num_prompt_tokens + r.max_tokens - 1 for r in running], np.int64),
            np.array(adapter_slots, np.int64) if any(adapter_slots) else None,
        )
