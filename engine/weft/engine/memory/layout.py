"""The one module that knows how KV lies in memory.

A layout has groups of planes. Planes of a group share page numbers and page tables: a page of the
group is one range of bytes, its planes one behind the other. Of a plane a pool is
`[num_pages, heads, layers, parts, page_size, dim]`, contiguous within a page: a head range of a
page is one range of bytes, and each (page, head, layer, part) is a dense `[page_size, dim]` matrix
for attention. How far it is from page to page is the tensor's first stride. All models have one
group of one plane; their pools are contiguous as a whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlane:
    """Entries of one shape for each position; independent of tensor parallelism."""

    name: str = "target"
    layers: int
    """A draft head's KV is one layer more, the last."""
    heads: int
    """KV heads over all ranks."""
    dim: int
    """Elements per head of each part."""
    dtype: str
    """float32, float16 or bfloat16."""
    parts: tuple[str, ...] = ("k", "v")
    """What is kept of each position and head: K and V, or one vector that is both."""
    draft: str = ""
    """Hexadecimal digest of the draft head whose KV is the last layer; empty: there is none."""


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Planes that share page numbers and page tables."""

    planes: tuple[PagedPlane, ...]
    """Planes of the group, in the order in which they lie in a page."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """What a model keeps of its tokens, page by page."""

    page_size: int
    """Token positions per page."""
    groups: tuple[PageGroup, ...]

    @classmethod
    def of_plane(cls, plane: PagedPlane, page_size: int) -> CacheLayout:
        """The layout of a model that has one plane."""
        return cls(page_size, (PageGroup((plane,)),))

    @property
    def plane(self) -> PagedPlane:
        """The plane of a model that has one."""
        (group,) = self.groups
        (plane,) = group.planes
        return plane

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of the plane in a page: (heads, layers, parts, page_size, dim)."""
        plane = self.plane
        return (plane.heads, plane.layers, len(plane.parts), self.page_size, plane.dim)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers."""
        return math.prod(self.page_shape) * DTYPE_BYTES[self.plane.dtype]

    def pool_shape(self, num_pages: int) -> tuple[int, ...]:
        """Shape of a pool tensor of `num_pages` pages."""
        return (num_pages, *self.page_shape)

    def describe(self) -> str:
        """Canonical text of the layout, part of the namespace."""
        plane = self.plane
        parts = ",".join(f"{part}:{plane.dim}:{plane.dtype}" for part in plane.parts)
        described = (
            f"plane={plane.name};layers={plane.layers};heads={plane.heads};"
            f"parts={parts};page_size={self.page_size};order=head,layer,part,position,dim"
        )
        return f"{described};draft={plane.draft}" if plane.draft else described
