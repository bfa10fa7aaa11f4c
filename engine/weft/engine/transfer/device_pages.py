"""The pages of a pool as bytes, also of a pool that is divided among the GPUs of several ranks.

A rank has the same range of bytes of every page: those of its KV heads. Ranks with the same heads
have copies of one another's parts, or divide the pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from weft.kernels.ops.page_digest import page_digests
from weft.kernels.ops.pages import gather_pages, scatter_pages
from weft.kernels.ops.pages.pool import ALL_PAGES, PageShare


def rows_of_pool(pool: torch.Tensor) -> torch.Tensor:
    """A pool [num_pages, ...], contiguous, as [num_pages, page_bytes] uint8."""
    return pool.view(torch.uint8).view(pool.shape[0], -1)


class PagePart(NamedTuple):
    pool: torch.Tensor
    """[num_pages, ...], contiguous within a page; in memory that this process's device maps."""
    begin: int
    """First byte in the page; a multiple of 8."""
    is_copy: bool = False
    """Whether another part has the same bytes of the same pages. This one is then only written."""
    share: PageShare = ALL_PAGES
    """Which pages have this part in this pool."""


class DevicePages:
    """Reads and writes whole pages on the current stream of one device."""

    @property
    def is_whole(self) -> bool:
        """Whether one pool has the pages."""
        return len(self.parts) == 1

    def __init__(self, parts: Sequence[PagePart]) -> None:
        self.parts = tuple(parts)
        self.device = parts[0].pool.device
        self._rows = [
            part.pool.view(torch.uint8).reshape(part.pool.shape[0], -1) for part in self.parts
        ]
        own = zip(self.parts, self._rows, strict=True)
        self.page_bytes = max(part.begin + rows.shape[1] for part, rows in own)

    @classmethod
    def of(cls, pool: Pages) -> DevicePages:
        """The pages of a pool [num_pages, ...] in one piece."""
        return pool if isinstance(pool, DevicePages) else cls([PagePart(pool, 0)])

    def gather(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        """Copies pages ([n] int64 on the device) to the rows of `out`, [n, page_bytes]."""
        for part, rows in zip(self.parts, self._rows, strict=True):
            if not part.is_copy:
                into = out[:, part.begin :][:, : rows.shape[1]]
                gather_pages(part.pool, pages, into, part.share)

    def scatter(self, source: torch.Tensor, pages: torch.Tensor) -> None:
        """Copies the rows of `source`, [n, page_bytes], to pages ([n] int64 on the device)."""
        for part, rows in zip(self.parts, self._rows, strict=True):
            of_part = source[:, part.begin :][:, : rows.shape[1]]
            scatter_pages(of_part, pages, part.pool, part.share)

    def digests(self, pages: torch.Tensor) -> torch.Tensor:
        """Digests ([n] int64) of pages ([n] int64 on the device)."""
        found = [
            page_digests(part.pool, pages, part.begin // 8, part.share)
            for part in self.parts
            if not part.is_copy
        ]
        return found[0] if len(found) == 1 else torch.stack(found).sum(dim=0)

    def read(self, page: int, out: torch.Tensor) -> None:
        """Copies a page to `out`, [page_bytes] uint8 anywhere."""
        for part, rows in zip(self.parts, self._rows, strict=True):
            row = part.share.row(page)
            if row is not None and not part.is_copy:
                out[part.begin :][: rows.shape[1]].copy_(rows[row], non_blocking=True)

    def write(self, page: int, source: torch.Tensor) -> None:
        """Copies `source`, [page_bytes] uint8 anywhere, to a page."""
        for part, rows in zip(self.parts, self._rows, strict=True):
            if (row := part.share.row(page)) is not None:
                rows[row].copy_(source[part.begin :][: rows.shape[1]], non_blocking=True)


Pages: TypeAlias = torch.Tensor | DevicePages
"""A pool [num_pages, ...] in one piece, or access to pages whose parts lie apart."""
