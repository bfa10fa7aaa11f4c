"""The jobs of a filler that holds pages, which pins them instead of computing them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.contract.handle import KvHandle
from weft.contract.keys import blocks_keys
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.contract.token_ids import TokenIds
from weft.kvstore.pages import PageStore
from weft.pages.fills.lease import FillJob
from weft.pages.transfer.chunks import ShipChunk, Shipper
from weft.pages.transfer.lanes import Target

MAX_FILL_PAGES = 1 << 16
"""Longest prompt, in pages."""


@dataclass(eq=False, slots=True, kw_only=True)
class StoreJob:
    """Implements `FillJob`: the pages of one lease."""

    lease_id: bytes
    tokens: TokenIds
    pages: list[int]
    digests: Sequence[int] | None
    num_computed: int
    """Positions released for shipping."""
    num_cached_tokens: int
    pinned: list[int]
    """Pages of the chain, from its beginning as far as held, and of the block after them. They stay
    pinned until the lease has ended.
    """
    block: list[int]
    """Pages that carry blocks of recurrent layers or window pages after the last page."""


class StoreJobs:
    """Implements `Jobs` over the held pages, and wraps the `Shipper` that moves the bytes.

    Pages are pinned from the acceptance of a lease until the shipper forgets it. A job's end does
    not unpin them, since chunks may still be on their way.
    """

    def __init__(self, pages: PageStore, shipper: Shipper, max_fills: int) -> None:
        self._pages = pages
        self._shipper = shipper
        self._max_fills = max_fills
        self.expected_keys: list[bytes] | None = None
        """Keys of the handle being examined; None: it is too long."""
        self._jobs: dict[bytes, StoreJob] = {}

    def get(self, lease_id: bytes) -> StoreJob | None:
        """The job of an open lease."""
        return self._jobs.get(lease_id)

    # -- Jobs ------------------------------------------------------------------------------------

    def why_not(self, handle: KvHandle) -> tuple[str, str]:
        keys = self.expected_keys
        if keys is None:
            return "too_long", f"{len(handle.tokens)} tokens are over {MAX_FILL_PAGES} pages"
        num_more = self.num_pages_of(handle)
        most = MAX_FILL_PAGES if handle.block_pages else MAX_STORED_BLOCK_PAGES
        if num_more > most:
            return "too_long", f"blocks of {num_more} pages, at most {most}"
        num_of_last = num_more - handle.state_pages
        if handle.block_pages and num_of_last > len(keys) * handle.block_pages:
            return "invalid", f"{num_more} pages in blocks of {handle.block_pages} at {len(keys)}"
        if len(self._jobs) >= self._max_fills:
            return "busy", f"{self._max_fills} fills are under way"
        first = handle.start_token // handle.page_size
        if not self._pages.num_held(keys[first : first + 1]):
            return "not_held", "the first page asked for is not here"
        of_block = blocks_keys(keys, num_more, handle.block_pages, handle.state_pages)
        if of_block and self._pages.num_held([*keys[first:], *of_block]) < (
            len(keys) - first + len(of_block)
        ):
            return "not_held", "what lies behind the last page, or pages before it, are not here"
        return "", ""

    def begin(self, handle: KvHandle, request_id: str, traceparent: str) -> StoreJob:
        """Pins the held pages of the range, and those before it if they are all held."""
        keys = self.expected_keys
        assert keys is not None
        first = handle.start_token // handle.page_size
        pinned = self._pages.pin(keys)
        if len(pinned) <= first:
            self._pages.unpin(pinned)
            pinned = self._pages.pin(keys[first:])
            pages = [0] * first + pinned
        else:
            pages = pinned
        num_more = self.num_pages_of(handle)
        block = self._pages.pin(blocks_keys(keys, num_more, handle.block_pages, handle.state_pages))
        job = StoreJob(
            lease_id=handle.lease_id,
            tokens=handle.tokens[: len(pages) * handle.page_size],
            pages=pages,
            digests=self._pages.digests_of([*pages, *block]),
            num_computed=0,
            num_cached_tokens=len(pages) * handle.page_size,
            pinned=[*pinned, *block],
            block=block,
        )
        self._jobs[handle.lease_id] = job
        return job

    def waits_s(self, job: FillJob) -> tuple[float, float]:
        return 0.0, 0.0

    def end(self, job: FillJob) -> None:
        """Unpins nothing: `forget` does."""

    # -- PieceSource -----------------------------------------------------------------------------

    def num_pages_of(self, handle: KvHandle) -> int:
        """Pages requested in addition to those of the range; 0 for a malformed range or number,
        which the filler declines.
        """
        start, end = handle.start_token, handle.end_token
        if handle.page_size < 1 or not 0 <= start < end == len(handle.tokens):
            return 0
        num_more, size = max(0, handle.companion_pages), handle.block_pages
        num_of_last = num_more - handle.state_pages
        if handle.state_pages > MAX_STORED_BLOCK_PAGES or num_of_last < 0:
            return 0
        if size and (size > MAX_STORED_BLOCK_PAGES or num_of_last % size):
            return 0
        return num_more

    def pack(self, job: FillJob, end_token: int) -> list[int] | None:
        assert isinstance(job, StoreJob)
        self._pages.memory.retain(job.block)
        return job.block.copy()

    # -- Shipper ---------------------------------------------------------------------------------

    holds_data = False
    """Data do not leave the process before they are sent."""

    def prepare(self, owner: tuple[str, int], target: Target) -> None:
        self._shipper.prepare(owner, target)

    def ship(self, chunk: ShipChunk) -> None:
        self._shipper.ship(chunk)

    def stop(self, lease_id: bytes) -> None:
        self._shipper.stop(lease_id)

    def forget(self, lease_id: bytes) -> None:
        """Ends the lease, and with it the pins on its pages."""
        self._shipper.forget(lease_id)
        job = self._jobs.pop(lease_id)
        self._pages.unpin(job.pinned)
