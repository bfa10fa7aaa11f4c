"""Bytes of pages, as the host accesses them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Page = NDArray[np.uint8]
"""The bytes of a page, uint8 `[page_bytes]`, contiguous."""


class StagingPages(Protocol):
    """Bytes of pages as the host accesses them, uint8 `[num_pages, page_bytes]`: an array or an
    equivalent.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(number of pages, bytes of a page)."""
        ...

    def __len__(self) -> int:
        """Number of pages."""
        ...

    def __getitem__(self, index: Any, /) -> Any:
        """Bytes as an array or a number; perhaps a copy."""
        ...

    def __setitem__(self, index: Any, value: Any, /) -> None:
        """Changes bytes in place."""
        ...


class PageCopy(NamedTuple):
    """A page whose content is copied to another one before the next step."""

    source: int
    destination: int
