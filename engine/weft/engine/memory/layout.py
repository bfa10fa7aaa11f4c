"""The one module that knows how KV lies in memory.

A pool is `[num_pages, heads, layers, parts, page_size, dim]`, contiguous: a page is one range of
bytes, a head range of a page is one range too, and each (page, head, layer, part) is a dense
`[page_size, dim]` matrix for attention.
"""

from __future__ import annotations

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneLayout:
    """Logical shape of a plane's pages; independent of tensor parallelism."""

    name: str = "target"
    layers: int
    heads: int
    """KV heads over all ranks."""
    dim: int
    """Elements per head of K and of V."""
    dtype: str
    """float32, float16 or bfloat16."""
    page_size: int
    """Token positions per page."""
    parts: tuple[str, ...] = ("k", "v")
    draft: str = ""
    """Hexadecimal digest of the draft head whose KV is the last layer; empty: there is none."""

    @property
    def page_shape(self) -> tuple[int, ...]:
        """(heads, layers, parts, page_size, dim)."""
        return (self.heads, self.layers, len(self.parts), self.page_size, self.dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        elements = self.heads * self.layers * len(self.parts) * self.page_size * self.dim
        return elements * DTYPE_BYTES[self.dtype]

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of a pool tensor of `num_pages` pages."""
        return (num_pages, *self.page_shape)

    def describe(self) -> str:
        """Canonical text of the layout, part of the namespace."""
        parts = ",".join(f"{part}:{self.dim}:{self.dtype}" for part in self.parts)
        described = (
            f"plane={self.name};layers={self.layers};heads={self.heads};"
            f"parts={parts};page_size={self.page_size};order=head,layer,part,position,dim"
        )
        return f"{described};draft={self.draft}" if self.draft else described
