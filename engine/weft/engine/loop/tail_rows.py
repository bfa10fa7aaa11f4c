"""Rows of media that travel to owners without an encoder.

An owner computes the tokens after a fill's last page itself. Where pages of KV are not all that it
needs to continue, it runs all of them, so it asks for the rows that they take. They follow all else
in the lease's pages, end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.contract.spans import MediaSpan, spans_from
from weft.engine.executor.orders import PackRows, UnpackRows
from weft.engine.executor.port import Executor
from weft.engine.loop.encode import media_order
from weft.engine.requests.media_rows import FilledMedia, MediaRows
from weft.engine.requests.request import Request


class TailRows:
    """Both sides of the way of such rows.

    Args:
        row_bytes: Bytes of a row.
        page_bytes: Bytes of a page of the first group.
        media: The filler's rows, or the owner's.
    """

    def __init__(
        self,
        row_bytes: int,
        page_bytes: int,
        page_size: int,
        media: MediaRows | FilledMedia,
        executor: Executor,
    ) -> None:
        self._row_bytes, self._page_bytes, self._page_size = row_bytes, page_bytes, page_size
        self._media = media
        self._executor = executor

    @property
    def max_pages(self) -> int:
        """Most pages that an owner asks for."""
        media = self._media
        return self._pages_of(media.slot_rows if isinstance(media, FilledMedia) else 0)

    def num_pages(self, spans: Sequence[MediaSpan]) -> int:
        return self._pages_of(sum(span.length for span in spans))

    def _pages_of(self, num_rows: int) -> int:
        return -(-num_rows * self._row_bytes // self._page_bytes)

    def wanted(self, request: Request, end_token: int) -> list[MediaSpan]:
        """What an owner asks for with a fill that ends at `end_token`."""
        if not isinstance(self._media, FilledMedia) or end_token < self._border(request):
            return []
        return spans_from(request.spans, max(0, end_token - 1))

    def lacks(self, request: Request) -> bool:
        """Whether an owner cannot compute the tokens after the prompt's last page."""
        border = self._border(request)
        if not (isinstance(self._media, FilledMedia) and self.wanted(request, border)):
            return False
        return not self._media.has_rows(request, border)

    def _border(self, request: Request) -> int:
        return request.num_reusable_tokens // self._page_size * self._page_size

    def places(self, job: Request) -> list[int] | None:
        """Where a filler has the rows that a job's owner asks for; None: there is no room to encode
        their media.
        """
        if not job.tail_spans:
            return []
        assert isinstance(self._media, MediaRows), "a handle asks for rows that can be made here"
        return self._media.encode_now(
            job.tail_spans, lambda due: self._executor.order(media_order(due))
        )

    def pack(self, places: Sequence[int], pages: Sequence[int]) -> None:
        if places:
            self._executor.order(PackRows(places, pages))

    def unpack(self, request: Request, end_token: int, pages: Sequence[int]) -> None:
        """Gives an owner's request the rows that a fill has brought."""
        if pages:
            assert isinstance(self._media, FilledMedia)
            self._executor.order(UnpackRows(self._media.take_rows(request, end_token), pages))
