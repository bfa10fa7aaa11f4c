"""Checks that published pages keep their content (fault tests only).

A published page is final. If one changes, a writer whose lease had ended wrote to it. If an
accepted page differs from what its filler sent, it was accepted without a check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weft.pages.memory.page_memory import PageMemory


@dataclass(frozen=True, slots=True)
class AuditReport:
    published_pages: int
    changed_pages: int
    """Pages whose content has changed since they were published."""
    corrupt_pages: int
    """Accepted pages that differed from those that their filler had sent, since start."""


class PageAudit:
    """Digests of all published pages of one engine. Only the engine thread uses it."""

    def __init__(
        self, digest_pages: Callable[[Sequence[int]], list[int]], memory: PageMemory
    ) -> None:
        self._digest_pages = digest_pages
        self._memory = memory
        self._digests: dict[int, int] = {}
        self._num_corrupt = 0
        memory.on_published.append(self._published)

    def accepted(self, pages: Sequence[int], sent: Sequence[int]) -> None:
        """Records pages that an owner accepts from a filler, and the digests that the
        filler sent.
        """
        found = self._digest_pages(pages)
        self._num_corrupt += sum(a != b for a, b in zip(found, sent, strict=True))

    def check(self) -> AuditReport:
        pages = [page for page in self._digests if self._memory.is_published(page)]
        found = self._digest_pages(pages) if pages else []
        changed = sum(self._digests[page] != now for page, now in zip(pages, found, strict=True))
        return AuditReport(len(pages), changed, self._num_corrupt)

    def _published(self, page: int, key: bytes, parent: bytes) -> None:
        (self._digests[page],) = self._digest_pages([page])
