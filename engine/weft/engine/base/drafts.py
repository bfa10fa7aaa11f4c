"""Drafts of a request: chains, trees, and drafts that are still on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import overload

from weft.engine.base.arrays import Int32Array


class DraftTree(list[int]):
    """Drafts of one request that form a tree, parents before children.

    Row 0 of the request is its last token, row i + 1 its draft i.

    Args:
        tokens: Tokens of the drafts.
        parents: For each draft, the row of its parent.
    """

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        super().__init__(tokens)
        self.parents = parents


def parents_of(drafts: Sequence[int]) -> Sequence[int]:
    """For each draft of a request, the row of its parent."""
    return drafts.parents if isinstance(drafts, DraftTree) else range(len(drafts))


Fetch = Callable[[], list[list[int]]]
"""A function that waits for the drafts and returns those of each request."""


class LaterDrafts(Sequence[list[int]]):
    """Drafts of requests that are on the device, which may still be computing them.

    Args:
        counts: Number of drafts of each request.
    """

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
            adapter_slots: Adapter slots of the step's requests, [R]; None: none has an adapter.
            num_before: Number of requests that precede these in the step.
        """

    def come_with(self, fetch: Fetch) -> None:
        """Notes that the drafts are being copied to the host, for example with the tokens of the
        step that verifies them; `fetch` waits for the copy.
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
        """The drafts of a request; waits for all of them."""
        if self._fetched is None:
            assert self._fetch is not None, "the drafts are not on their way to the host"
            self._fetched = self._fetch()
        return self._fetched[index]
