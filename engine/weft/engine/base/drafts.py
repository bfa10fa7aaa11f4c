"""Drafts of a request: chains, trees, and those that still lie on the device."""

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
"""Waits for the drafts of each request."""


class LaterDrafts(Sequence[list[int]]):
    """Drafts of requests that lie on the device, where they may still be computed.

    Args:
        counts: Number of drafts of each request.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._fetch: Fetch | None = None
        self._fetched: list[list[int]] | None = None

    def begin(self) -> None:
        """Starts the drafts that have not begun, with inputs of their own. The step is launched
        afterwards.
        """

    def begin_within(
        self, num_requests: int, adapter_slots: Int32Array | None, num_before: int
    ) -> None:
        """Starts what has not begun, with the inputs of the step itself, which were sent just now.

        Args:
            num_requests: That the step is padded to.
            adapter_slots: Adapter slots of the step's requests, [R]; None: none has an adapter.
            num_before: Number of the step's requests before these.
        """

    def come_with(self, fetch: Fetch) -> None:
        """Notes that they come to the host, as with the tokens of the step that verifies them;
        `fetch` waits for them.
        """
        self._fetch = fetch

    @property
    def is_coming(self) -> bool:
        """Whether they come to the host, so that they can be asked for."""
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
