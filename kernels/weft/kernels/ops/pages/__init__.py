"""Operations on whole pages of a KV pool.

A pool is a tensor `[num_pages, ...]` of any dtype whose pages are contiguous. Page numbers come
from the host, which owns and checks them. On a CUDA device the work is enqueued on the current
stream, and nothing waits for it.

Gathering and scattering take page numbers on the device. The host must have checked them, since a
check here would wait for the device.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from weft.contract.layout import PagePart
from weft.kernels.ops.pages.pool import ALL_PAGES, PageShare, has_dense_pages, row_in_pool
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.pages import triton_pages as _triton_pages
else:
    _triton_pages = deferred(__name__, "weft.kernels.ops.pages.triton_pages")

_MAX_SINGLE_COPIES = 16
"""Most pages that a GPU copies one by one, with a launch each; indexing takes several launches."""
_REPACKED_BYTES = 8 << 20
"""Most bytes that are copied between pools at once; a temporary buffer has the same size."""


def copy_pages(pool: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copies pages inside a pool.

    Args:
        pool: `[num_pages, ...]`; changed.
        sources: Page numbers; repetitions allowed.
        destinations: As many, all different, none of them a source.

    Raises:
        ValueError: The page numbers are not valid; nothing was copied.
    """
    _check_pages(pool)
    num_pages = pool.shape[0]
    if not all(0 <= page < num_pages for page in (*sources, *destinations)):
        raise ValueError(f"not all of {sources} and {destinations} are in a pool of {num_pages}")
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} sources for {len(destinations)} destinations")
    if len(set(destinations)) != len(destinations):
        raise ValueError("a destination is named twice")
    if not set(sources).isdisjoint(destinations):
        raise ValueError("a page is source and destination")
    rows = pool.view(num_pages, math.prod(pool.shape[1:]))
    # A page is large, so a copy for each page runs at memory speed; indexing does not.
    if pool.device.type == "cpu" or len(sources) <= _MAX_SINGLE_COPIES:
        for source, destination in zip(sources, destinations, strict=True):
            rows[destination].copy_(rows[source], non_blocking=True)
        return
    index = page_index(destinations, pool.device)
    rows.index_copy_(0, index, rows[page_index(sources, pool.device)])


def gather_pages(pool: Tensor, pages: Tensor, out: Tensor, share: PageShare = ALL_PAGES) -> None:
    """Copies pages of a pool to a dense buffer.

    Args:
        pool: `[num_pages, ...]`, contiguous within a page; a page, and the distance between pages,
            is a multiple of 4 bytes; not changed.
        pages: int64 `[n]` on the pool's device: page numbers, in any order, repetitions allowed.
            Each must be in the pool.
        out: uint8 `[n or more, bytes of a page]` on the pool's device, whose rows are contiguous
            and a multiple of 4 bytes apart; its first n rows are written.
        share: Which of the pages the pool has. Rows of the others are left as they are.

    Raises:
        ValueError: A shape, dtype or device does not fit; nothing was copied.
    """
    rows = _words(pool, pages, out)
    if pool.is_cuda and len(pages):
        _triton_pages.gather_rows(rows, pages, out.view(torch.int32), share)
    elif len(pages):
        gather_pages_reference(pool, pages, out, share)


def scatter_pages(
    source: Tensor, pages: Tensor, pool: Tensor, share: PageShare = ALL_PAGES
) -> None:
    """Copies the rows of a dense buffer to pages of a pool.

    Args:
        source: uint8 `[n or more, bytes of a page]` on the pool's device, whose rows are contiguous
            and a multiple of 4 bytes apart; not changed.
        pages: int64 `[n]` on the pool's device: where the first n rows go; all different. Each
            must be in the pool.
        pool: `[num_pages, ...]`, contiguous within a page; a page, and the distance between pages,
            is a multiple of 4 bytes; changed.
        share: Which of the pages the pool has. The others are not copied.

    Raises:
        ValueError: A shape, dtype or device does not fit; nothing was copied.
    """
    rows = _words(pool, pages, source)
    if pool.is_cuda and len(pages):
        _triton_pages.scatter_rows(source.view(torch.int32), pages, rows, share)
    elif len(pages):
        scatter_pages_reference(source, pages, pool, share)


def copy_parts(addresses: Tensor, pages: Tensor, pool: Tensor, part: PagePart) -> None:
    """Copies a part of whole pages that lie anywhere in memory, to the same part of pages of a
    pool. On a GPU the kernel reads pinned host memory itself and leaves most of the GPU to others.

    Args:
        addresses: int64 `[n]` on the pool's device: where each page begins, in memory that the
            device reads; multiples of 16 if the part's stride is one. The host must have checked
            them.
        pages: int64 `[n]` on the pool's device: where they go; all different.
        pool: `[num_pages, ...]`, contiguous within a page; changed.
        part: Its numbers are multiples of 4 bytes.

    Raises:
        ValueError: A shape, dtype or device does not fit; nothing was copied.
    """
    rows = page_words(pool, pages)
    num_bytes = rows.shape[1] * rows.itemsize
    if part.num_ranges * part.stride != num_bytes or part.begin + part.size > part.stride:
        raise ValueError(f"{part} is no part of a page of {num_bytes} bytes")
    if any(size % rows.itemsize for size in part[1:]):
        raise ValueError(f"{part} does not begin and end at 4-byte words")
    if addresses.dtype != torch.int64 or addresses.shape != pages.shape:
        raise ValueError(f"addresses are {addresses.dtype} {tuple(addresses.shape)}")
    if len(pages) and part.size:
        if pool.is_cuda:
            _triton_pages.copy_part_rows(addresses, pages, rows, part)
        else:
            copy_parts_reference(addresses, pages, pool, part)


def copy_parts_reference(addresses: Tensor, pages: Tensor, pool: Tensor, part: PagePart) -> None:
    """`copy_parts` of a pool in host memory."""
    rows, end = _bytes(pool), part.begin + part.size
    for address, page in zip(addresses.tolist(), pages.tolist(), strict=True):
        memory = (ctypes.c_uint8 * rows.shape[1]).from_address(address)
        found = torch.frombuffer(memory, dtype=torch.uint8).view(part.num_ranges, part.stride)
        rows[page].view(part.num_ranges, part.stride)[:, part.begin : end] = found[
            :, part.begin : end
        ]


def rows_here(pages: Tensor, share: PageShare) -> tuple[Tensor | slice, Tensor]:
    """Which of these pages a pool has, as indices into them, and their rows in the pool."""
    if share.size == 1:
        return slice(0, len(pages)), pages
    (here,) = (pages % share.size == share.rank).nonzero(as_tuple=True)
    return here, row_in_pool(pages[here], share.size)


def gather_pages_reference(
    pool: Tensor, pages: Tensor, out: Tensor, share: PageShare = ALL_PAGES
) -> None:
    """`gather_pages` in eager torch, any device; a CPU uses it too."""
    here, rows = rows_here(pages, share)
    out[here] = _bytes(pool)[rows]


def scatter_pages_reference(
    source: Tensor, pages: Tensor, pool: Tensor, share: PageShare = ALL_PAGES
) -> None:
    """`scatter_pages` in eager torch, any device; a CPU uses it too."""
    here, rows = rows_here(pages, share)
    _bytes(pool).index_copy_(0, rows, source[here])


def _words(pool: Tensor, pages: Tensor, buffer: Tensor) -> Tensor:
    """The pool as int32 `[num_pages, words]`; checks it, the page numbers' tensor and a buffer."""
    rows = page_words(pool, pages)
    num_bytes = rows.shape[1] * rows.itemsize
    is_dense = buffer.dim() == 2 and buffer.stride(1) == 1 and is_viewable_as(buffer, torch.int32)
    if buffer.dtype != torch.uint8 or not is_dense:
        raise ValueError(
            f"not a uint8 buffer of contiguous rows: {buffer.dtype} {tuple(buffer.shape)}"
        )
    if buffer.shape[1] != num_bytes or buffer.shape[0] < len(pages):
        raise ValueError(
            f"a buffer {tuple(buffer.shape)} for {len(pages)} pages of {num_bytes} bytes"
        )
    if buffer.device != pool.device:
        raise ValueError(f"the pool is on {pool.device}, the buffer on {buffer.device}")
    return rows


def page_words(pool: Tensor, pages: Tensor) -> Tensor:
    """A pool as int32 `[num_pages, words of a page]`.

    Raises:
        ValueError: A page is not contiguous or has no whole words, or `pages` are no page numbers
            on the pool's device.
    """
    _check_pages(pool)
    num_bytes = math.prod(pool.shape[1:]) * pool.itemsize
    if num_bytes == 0 or num_bytes % 4:
        raise ValueError(f"a page of {num_bytes} bytes is not a number of 4-byte words")
    if pages.dtype != torch.int64 or pages.dim() != 1 or pages.device != pool.device:
        raise ValueError(
            f"pages are {pages.dtype} {tuple(pages.shape)} on {pages.device}, not int64 [n] on "
            f"{pool.device}"
        )
    rows = pool.view(pool.shape[0], -1)
    if not is_viewable_as(rows, torch.int32):
        raise ValueError(f"pages do not begin at words: {pool.stride(0)} elements of {pool.dtype}")
    return rows.view(torch.int32)


def is_viewable_as(rows: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row of a matrix begins and ends at whole elements of `dtype`."""
    scale = max(1, dtype.itemsize // rows.itemsize)
    return all(size % scale == 0 for size in (rows.shape[1], rows.stride(0), rows.storage_offset()))


def _check_pages(pool: Tensor) -> None:
    if pool.dim() < 2 or not has_dense_pages(pool):
        raise ValueError(f"not a pool of contiguous pages: {tuple(pool.shape)} {pool.stride()}")


def _bytes(pool: Tensor) -> Tensor:
    return pool.view(pool.shape[0], -1).view(torch.uint8)


def repack_pages(
    pool: Tensor,
    pages: Sequence[int],
    target: Tensor,
    destinations: Sequence[int],
    *,
    num_runs: int = 1,
) -> None:
    """Copies the bytes of pages, in order, into pages of another pool, which may be longer or
    shorter. Bytes of the destinations that are left over become zero.

    Args:
        pool: `[num_pages, page_bytes]` uint8, contiguous.
        pages: Page numbers; the caller has checked these and `destinations`.
        target: Like `pool`, with another number and length of pages; changed.
        destinations: Page numbers, all different. Bytes that do not fit are not copied.
        num_runs: Number of equal runs into which both lists are cut. Each run of pages is copied
            into the run of destinations with the same number.
    """
    unit = math.gcd(pool.shape[1], target.shape[1])
    units, into = (
        _units(page_index(numbers, pool.device), of.shape[1] // unit, num_runs)
        for numbers, of in ((pages, pool), (destinations, target))
    )
    rows, own = pool.view(-1, unit), target.view(-1, unit)
    count, step = min(units.shape[1], into.shape[1]), max(1, _REPACKED_BYTES // unit)
    sources, copied = units[:, :count].flatten(), into[:, :count].flatten()
    for begin in range(0, len(sources), step):
        some = slice(begin, begin + step)
        own.index_copy_(0, copied[some], rows.index_select(0, sources[some]))
    own.index_fill_(0, into[:, count:].flatten(), 0)


def _units(pages: Tensor, num_units: int, num_runs: int) -> Tensor:
    """[num_runs, units]: numbers of the equal parts of pages, in order."""
    parts = torch.arange(num_units, device=pages.device)
    return (pages[:, None] * num_units + parts).view(num_runs, len(pages) * num_units // num_runs)


def page_index(pages: Sequence[int], device: torch.device) -> Tensor:
    """Page numbers on a device, to index a pool with; the host does not wait for the copy.

    Returns:
        `[len(pages)]` int64.
    """
    host = torch.tensor(pages, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)
