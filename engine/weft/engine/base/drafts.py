"""Drafts of requests: the shapes that a step may verify, and drafts that are on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

from weft.contract.arrays import Int32Array
from weft.engine.base.config import MAX_TREE_NODES


class DraftShape(NamedTuple):
    """Number and shape of the drafts of each request in a step."""

    num_drafts: int
    depth: int
    """Most drafts that one step can accept; of a chain, all of them."""
    width: int = 1
    """Number of nodes of each level that get this many children each; 1: a chain."""

    @classmethod
    def chain(cls, num_drafts: int) -> DraftShape:
        return cls(num_drafts, num_drafts)

    @property
    def is_tree(self) -> bool:
        """Whether several drafts may follow one token."""
        return self.width > 1

    @property
    def num_grown(self) -> int:
        """Number of nodes that the drafter grows. It chooses the nodes of the tree from them."""
        return self.width + self.width * self.width * (self.depth - 1)

    @property
    def num_places(self) -> int:
        """Number of positions after the last token where the drafter writes K and V of drafts."""
        return max(self.num_drafts, self.width * (self.depth - 1)) if self.is_tree else self.depth


DEPTHS = (0, 1, 2, 3, 4, 5, 7)
"""Lengths of the chains that a gate compares; 0: no drafts."""


TREES = ((7, 5), (15, 6), (MAX_TREE_NODES, 6))
"""Nodes and depths of the trees that a gate compares with the chains. The depth never falls as the
number of nodes rises.
"""


def depths_up_to(max_drafts: int) -> list[int]:
    """Lengths of the chains that a gate compares, up to a maximum."""
    return [*(depth for depth in DEPTHS if depth < max_drafts), max_drafts]


def tree_shapes(width: int) -> list[DraftShape]:
    """Trees of this width that a gate compares; none for width 1."""
    if width == 1:
        return []
    shapes = [DraftShape(nodes, depth, width) for nodes, depth in TREES]
    return [shape for shape in shapes if shape.num_drafts <= shape.num_grown]


Fetch = Callable[[], list[list[int]]]
"""Waits for the drafts and returns those of each request."""


class LaterDrafts(Sequence[list[int]]):
    """Drafts that are on the device, which may still be computing them."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._fetch: Fetch | None = None
        self._fetched: list[list[int]] | None = None

    def begin(self) -> None:
        """Starts the drafts that have not begun, with inputs that are sent for them. The caller
        launches the step afterwards.
        """

    def begin_within(
        self, num_requests: int, adapter_slots: Int32Array | None, num_before: int
    ) -> None:
        """Starts the drafts that have not begun, with the inputs of the step, which were just sent.

        Args:
            num_requests: Number of requests to which the step is padded.
            adapter_slots: Adapter slots of the step's requests, [R]; None: no request has an
                adapter.
            num_before: Number of requests that precede these in the step.
        """

    def come_with(self, fetch: Fetch) -> None:
        """Call it when the drafts are being copied to the host, for example with the tokens of the
        step that verifies them. `fetch` waits for the copy.
        """
        self._fetch = fetch

    @property
    def is_coming(self) -> bool:
        """Whether the drafts are being copied to the host, so that callers can read them."""
        return self._fetch is not None

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...

    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        """The drafts of a request. Waits for all of them."""
        if self._fetched is None:
            assert self._fetch is not None, "the drafts are not on their way to the host"
            self._fetched = self._fetch()
        return self._fetched[index]
