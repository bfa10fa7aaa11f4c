"""The one module that knows how KV lies in memory.

A layout has groups of planes. Planes of a group share page numbers and page tables: a page of the
group is one range of bytes, in which the planes follow one another. The pool of a plane is
`[num_pages, heads, layers, parts, page_size, dim]`, contiguous within a page: a head range of a
page is one range of bytes, and each (page, head, layer, part) is a dense `[page_size, dim]` matrix
for attention. After them a page of the first group may have a `RoutePlane`. The tensor's first
stride is the distance between pages. Most groups have one plane, and its pool is contiguous as a
whole. Layers with other heads have a separate plane; the pool of a group of several planes is
`[num_pages, elements]`, and `PlaneInPage` finds a plane in it. Each group after the first has a
separate pool and separate page numbers; a request keeps only those of its pages that its window
still reaches.

Recurrent layers have no pages. Their state at a page border is a block, which never changes once
it is written: `[num_blocks, layers, ...]` for each part of a `StatePlane`. Their inputs at the
positions after a slot's last block are in its ring, `[slots + 1, ring_rows, layers, ...]`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8_e4m3": 1, "int8": 1}
FP8, INT8 = "fp8_e4m3", "int8"
"""Formats that keep a vector as 8-bit numbers with a scale (`weft.kernels.ops.pages.scaled_kv`)."""
_SCALE_BYTES = 4
_ROUTE_ALIGNMENT = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPlane:
    """Entries of one shape for each position; independent of tensor parallelism."""

    name: str = "target"
    """`target`, or `window_plane(reach)` for sliding-window layers with a separate group."""
    layers: int
    """Number of layers; the KV of a draft head counts as one more, the last."""
    heads: int
    """KV heads over all ranks."""
    dim: int
    """Elements per head of each part."""
    dtype: str
    """float32, float16, bfloat16, fp8_e4m3 or int8."""
    parts: tuple[str, ...] = ("k", "v")
    """Number of vectors per position and head: K and V, or one vector that serves as both."""
    draft: str = ""
    """Hexadecimal digest of the draft head whose KV is the last layer; empty: there is none."""

    @property
    def kept(self) -> int:
        """Elements that a vector takes, its scale included."""
        return self.dim + (_SCALE_BYTES if self.dtype in (FP8, INT8) else 0)

    @property
    def width(self) -> int:
        """Elements of a position, all layers."""
        return self.heads * self.layers * len(self.parts) * self.kept


def in_8_bits(layout: CacheLayout, dtype: str) -> CacheLayout:
    """`layout` with vectors in FP8 or INT8, for models that `why_not_8_bits` allows."""
    groups = tuple(
        replace(group, planes=tuple(replace(plane, dtype=dtype) for plane in group.planes))
        for group in layout.groups
    )
    return replace(layout, groups=groups)


def window_plane(reach: int) -> str:
    """Name of the plane of layers that attend to at most `reach` positions."""
    return f"window-{reach}"


def plane_beside(name: str, heads: int, dim: int) -> str:
    """Name of a further plane in the pages of the plane `name`: of layers with such heads."""
    return f"{name}-{heads}x{dim}"


class RoutePlane(NamedTuple):
    """The experts that routers have chosen for each position, at the end of a page:
    `[page_size, layers, top_k]`, then zeros up to a multiple of 128 bytes.
    """

    layers: tuple[int, ...]
    """Numbers of the model's layers with experts, in order."""
    all_layers: int
    """Number of all layers of the model."""
    top_k: int
    """Experts of each position, whose numbers ascend."""
    number_bytes: int
    """Bytes of a number: 1, or 2 with more than 256 experts."""

    @property
    def width(self) -> int:
        """Numbers of a position."""
        return len(self.layers) * self.top_k

    def num_bytes(self, page_size: int) -> int:
        """Bytes that a page has of it."""
        used = page_size * self.width * self.number_bytes
        return -(-used // _ROUTE_ALIGNMENT) * _ROUTE_ALIGNMENT

    def describe(self) -> str:
        """Canonical text of the plane."""
        layers = ",".join(map(str, self.layers))
        return f"routes={layers};experts={self.top_k};bytes={self.number_bytes}"


class LayerSlices(NamedTuple):
    """Where the layers of a page lie: each head has all of its layers, one after another."""

    heads: int
    layers: int
    layer_bytes: int
    """Bytes of one layer of one head."""

    def part(self, layers: range) -> PagePart:
        return PagePart(
            self.heads,
            self.layers * self.layer_bytes,
            layers.start * self.layer_bytes,
            len(layers) * self.layer_bytes,
        )


class PagePart(NamedTuple):
    """Ranges of equal length in a page, at equal distances: consecutive layers of each head."""

    num_ranges: int
    stride: int
    """Bytes from one range to the next."""
    begin: int
    """First byte of the first range."""
    size: int
    """Bytes of each range."""


class PagePiece(NamedTuple):
    """Bytes of a host in a page of all hosts, and in its own row."""

    whole: PagePart
    own: PagePart


class PageShare(NamedTuple):
    """What one of several hosts has of each page."""

    page_bytes: int
    """Of the whole page."""
    pieces: tuple[PagePiece, ...]


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Planes that share page numbers and page tables."""

    planes: tuple[PagedPlane, ...]
    """Planes of the group, in the order in which they lie in a page."""
    reach: int | None = None
    """Most last positions, a row's own included, of which a row needs the entries; None: all."""
    routes: RoutePlane | None = None
    """None: pages have no routes of experts."""

    @property
    def plane(self) -> PagedPlane:
        """The first plane of the group, of most models the only one."""
        return self.planes[0]

    @property
    def layers(self) -> int:
        return sum(plane.layers for plane in self.planes)

    def first_needed(self, position: int) -> int:
        """The first position of which a row at `position` needs the entries."""
        return 0 if self.reach is None else max(0, position - self.reach + 1)

    def most_pages(self, page_size: int, max_rows: int = 1) -> int:
        """Most pages that a request holds of a group with a reach, not counting the prompt tokens
        of two steps, each of which may have `max_rows` rows. The window may begin and end inside
        pages, and the request gets a page before it frees one.
        """
        assert self.reach is not None
        return -(-(self.reach + 2 * (max_rows - 1)) // page_size) + 3

    def describe_kept(self) -> str:
        """Which positions a request keeps, in words."""
        return "keep all positions" if self.reach is None else f"keep the last {self.reach:,}"

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """Shape of a page without routes: (heads, layers, parts, page_size, elements of a vector)
        of the plane, or the elements of several planes.
        """
        if len(self.planes) > 1:
            return (page_size * sum(plane.width for plane in self.planes),)
        plane = self.plane
        return (plane.heads, plane.layers, len(plane.parts), page_size, plane.kept)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers of the group."""
        of_routes = 0 if self.routes is None else self.routes.num_bytes(page_size)
        return math.prod(self.page_shape(page_size)) * DTYPE_BYTES[self.plane.dtype] + of_routes

    def layer_slices(self, page_size: int) -> LayerSlices | None:
        """None: a page has several planes, whose layers do not follow one another, or routes."""
        if len(self.planes) > 1 or self.routes is not None:
            return None
        heads, layers, *of_layer = self.page_shape(page_size)
        return LayerSlices(heads, layers, math.prod(of_layer) * DTYPE_BYTES[self.plane.dtype])

    def describe(self, page_size: int) -> str:
        """Canonical text of the group."""
        planes = [_describe(plane, page_size) for plane in self.planes]
        return "+".join(planes if self.routes is None else [*planes, self.routes.describe()])


class StatePart(NamedTuple):
    """A tensor of one layer in a `StatePlane`."""

    name: str
    shape: tuple[int, ...]
    """Shape for one layer at one position; heads or channels come first."""
    dtype: str
    """float32, float16 or bfloat16."""

    @property
    def size(self) -> int:
        """Elements of one layer at one position."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer at one position."""
        return self.size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePlane:
    """The state that a model's recurrent layers, all of one shape, keep for a request."""

    name: str
    """Kind of the layers, such as `gated-delta`."""
    layers: int
    """Number of recurrent layers."""
    parts: tuple[StatePart, ...]
    """The summary of all tokens before a page border: recurrent state, last inputs of the short
    convolution. All zeros before the first token.
    """
    ring: tuple[StatePart, ...]
    """Inputs of one position, from which the layer computes states and outputs again."""
    found: tuple[StatePart, ...] = ()
    """Keys and updates of one position, which steps on a GPU keep in the ring, so as not to compute
    them again (`weft.kernels.ops.slot_states.spec.LayerMemory.found`).
    """
    rows: tuple[StatePart, ...] = ()
    """Data of the rows themselves, once for all layers: a ring has it for each position, a block
    for the last position before its border. Draft heads continue from such rows.
    """

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, all layers."""
        of_rows = sum(part.num_bytes for part in self.rows)
        return self.layers * sum(part.num_bytes for part in self.parts) + of_rows

    @property
    def ring_row_bytes(self) -> int:
        """Bytes of one position in a ring, all layers."""
        of_rows = sum(part.num_bytes for part in self.rows)
        return self.layers * sum(part.num_bytes for part in self.ring) + of_rows

    @property
    def found_row_bytes(self) -> int:
        """Bytes that a GPU keeps for a position of a ring in addition."""
        return self.layers * sum(part.num_bytes for part in self.found)

    def over_ranks(self, size: int) -> StatePlane:
        """The plane of all of `size` ranks, of which this is the plane of one: each has a range of
        the first axis of every part.
        """
        return self._with_first_axes(lambda length: length * size)

    def of_rank(self, size: int) -> StatePlane:
        """The plane of one of `size` ranks: the inverse of `over_ranks`."""
        return self._with_first_axes(lambda length: length // size)

    def _with_first_axes(self, change: Callable[[int], int]) -> StatePlane:
        parts, ring, found = (
            tuple(
                part._replace(shape=(change(part.shape[0]), *part.shape[1:]))
                if part.shape
                else part
                for part in some
            )
            for some in (self.parts, self.ring, self.found)
        )
        return replace(self, parts=parts, ring=ring, found=found)

    def describe(self) -> str:
        """Canonical text of what a block contains; rings are never exchanged."""
        parts, rows = (
            ",".join(f"{part.name}:{part.size}:{part.dtype}" for part in some)
            for some in (self.parts, self.rows)
        )
        described = f"states={self.name};layers={self.layers};parts={parts}"
        return f"{described};rows={rows}" if rows else described


def num_ring_rows(page_size: int, max_rows: int) -> int:
    """Positions of a slot's ring: those since its last block, and those of a step, `max_rows` at
    most. A block is written in the step after the one that verified rows across its border.
    """
    return page_size + 2 * max_rows


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Shape of the data that a model keeps of its tokens in pages and blocks."""

    page_size: int
    """Token positions per page."""
    groups: tuple[PageGroup, ...]
    states: StatePlane | None = None
    """Blocks of recurrent layers; None: the model has none."""

    @classmethod
    def of_plane(cls, plane: PagedPlane, page_size: int) -> CacheLayout:
        """The layout of a model that has one plane."""
        return cls(page_size, (PageGroup((plane,)),))

    @classmethod
    def of_planes(cls, planes: Sequence[PagedPlane], page_size: int) -> CacheLayout:
        """The layout with these planes, in their order; names tell which of them share pages."""
        groups: list[list[PagedPlane]] = []
        for plane in planes:
            first = groups[-1][0].name if groups else ""
            if groups and plane.name == plane_beside(first, plane.heads, plane.dim):
                groups[-1].append(plane)
            else:
                groups.append([plane])
        return cls(page_size, tuple(PageGroup(tuple(group)) for group in groups))

    @property
    def plane(self) -> PagedPlane:
        """The first plane of the first group, which keeps all positions."""
        return self.groups[0].plane

    @property
    def routes(self) -> RoutePlane | None:
        """None: pages have no routes of experts."""
        return self.groups[0].routes

    @property
    def companions(self) -> tuple[StatePlane | PageGroup, ...]:
        """What lies in pieces beside pages of the first group, in the order in which leases have
        it: states, of which a request needs one piece, then further page groups.
        """
        return (*([] if self.states is None else [self.states]), *self.groups[1:])

    @property
    def piece_bytes(self) -> tuple[int, ...]:
        """Bytes of a piece of each companion."""
        of_states = [] if self.states is None else [self.states.block_bytes]
        return (*of_states, *(group.page_bytes(self.page_size) for group in self.groups[1:]))

    def of_states(self, num_pieces: Sequence[int]) -> int:
        """Out of the numbers of pieces of all companions, that of states; 0: there are none."""
        return 0 if self.states is None else num_pieces[0]

    def of_windows(self, num_pieces: Sequence[int]) -> Sequence[int]:
        """Out of the numbers of pieces of all companions, those of further page groups."""
        return num_pieces if self.states is None else num_pieces[1:]

    def with_routes(self, routes: RoutePlane) -> CacheLayout:
        """The layout whose pages of the first group also have routes."""
        first, *others = self.groups
        return replace(self, groups=(replace(first, routes=routes), *others))

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of a page of the first group, by `PageGroup.page_shape`."""
        return self.groups[0].page_shape(self.page_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of the first group."""
        return self.groups[0].page_bytes(self.page_size)

    def pool_shape(self, num_pages: int, group: int = 0) -> tuple[int, ...]:
        """Shape of a pool tensor of `num_pages` pages of a group, without routes."""
        return (num_pages, *self.groups[group].page_shape(self.page_size))

    def describe(self) -> str:
        """Canonical text of the layout, part of the namespace."""
        groups = [group.describe(self.page_size) for group in self.groups]
        return "|".join(groups if self.states is None else [*groups, self.states.describe()])


def _describe(plane: PagedPlane, page_size: int) -> str:
    parts = ",".join(f"{part}:{plane.dim}:{plane.dtype}" for part in plane.parts)
    described = (
        f"plane={plane.name};layers={plane.layers};heads={plane.heads};"
        f"parts={parts};page_size={page_size};order=head,layer,part,position,dim"
    )
    return f"{described};draft={plane.draft}" if plane.draft else described
