"""Pages and blocks of an engine on several hosts, each of which has those of its stage.

Rank 0 reads and writes the memory of the other hosts over one TCP connection to each, beside that
of frames:

request    operation, memory, number of frames, number of rows, int64 each; the rows' numbers,
           int64; their bytes, if they are written
answer     the bytes, or int64 digests, of the rows; one byte after a write

A host answers when it has done as many frames as the request says.
"""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from weft.contract.arrays import Int64Array
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.layout import DTYPE_BYTES, CacheLayout, PagePart, PagePiece, PageShare
from weft.engine.base.device_copies import Mark, on_host
from weft.engine.executor.local import LocalExecutor
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.host_sockets import receive_exactly
from weft.engine.parallel.shards import kv_heads_of
from weft.engine.transfer.device_pages import DevicePages, rows_of_pool
from weft.engine.transfer.device_pages import PagePart as DevicePart
from weft.kernels.ops.page_digest import page_digests
from weft.pages.transfer.digest import digest_pages

logger = logging.getLogger(__name__)

_REQUEST = struct.Struct("<qqqq")
_READ, _WRITE, _DIGEST = range(3)
PAGES, BLOCKS, MIRRORED = range(3)
"""Numbers of the memories."""
_WORD = 8
MIRROR_ROW_BYTES = 1 << 14
"""Memory that is alike on all hosts is sent in rows of this size, those that have changed."""


def _ranges(rows: torch.Tensor, part: PagePart) -> torch.Tensor:
    """[n, ranges, bytes of a range]: a view of rows, [n, bytes] uint8."""
    size = (len(rows), part.num_ranges, part.size)
    begin = rows.storage_offset() + part.begin
    return rows.as_strided(size, (rows.stride(0), part.stride, 1), begin)


def _on_device_of(rows: torch.Tensor) -> AbstractContextManager[None]:
    return _on_device(rows.device)


def _on_device(device: torch.device) -> AbstractContextManager[None]:
    if device.type == "cpu":
        return nullcontext()
    found: AbstractContextManager[None] = torch.cuda.device(device)
    return found


def pieces_of_pages(layouts: Sequence[CacheLayout], stage: int) -> list[PagePiece]:
    """What a stage has of a page of the first group, by the layouts of all stages."""
    pieces, of_page, of_own = [], 0, 0
    page_size = layouts[0].page_size
    for number, plane in enumerate(layouts[0].groups[0].planes):
        counts = [layout.groups[0].planes[number].layers for layout in layouts]
        size = page_size * len(plane.parts) * plane.kept * DTYPE_BYTES[plane.dtype]
        first, own, every = sum(counts[:stage]) * size, counts[stage] * size, sum(counts) * size
        whole = PagePart(plane.heads, every, of_page + first, own)
        pieces.append(PagePiece(whole, PagePart(plane.heads, own, of_own, own)))
        of_page += plane.heads * every
        of_own += plane.heads * own
    if any(piece.whole.begin % _WORD or piece.whole.size % _WORD for piece in pieces):
        raise ConfigError(
            f"page_size = {page_size}: the layers of a page must be multiples of {_WORD} bytes "
            "where pages leave stages that have some of their layers each",
            param="page_size",
        )
    return pieces


def parts_of_stage(
    layouts: Sequence[CacheLayout], stage: int, pools: Sequence[torch.Tensor]
) -> list[DevicePart]:
    """What the ranks of a stage have of whole pages.

    Args:
        layouts: Of all stages, with the heads of all ranks.
        pools: Of the ranks, [num_pages, ...] each, with their heads. With several ranks pages have
            heads of one shape.
    """
    parts = list[DevicePart]()
    for whole, own in pieces_of_pages(layouts, stage):
        seen = set[int]()
        for rank, rows in enumerate(map(rows_of_pool, pools)):
            heads = kv_heads_of(own.num_ranges, rank, len(pools))
            for place, head in enumerate(range(heads.start, heads.stop)):
                begin = own.begin + place * own.stride
                part = rows[:, begin : begin + own.size]
                at = whole.begin + head * whole.stride
                parts.append(DevicePart(part, at, is_copy=head in seen))
                seen.add(head)
    return parts


def share_of_pages(layouts: Sequence[CacheLayout], stage: int) -> PageShare:
    every = [piece for each in range(len(layouts)) for piece in pieces_of_pages(layouts, each)]
    return PageShare(_row_bytes(every), tuple(pieces_of_pages(layouts, stage)))


def pieces_of_blocks(layouts: Sequence[CacheLayout], stage: int) -> list[PagePiece]:
    """As `pieces_of_pages`, of a block of recurrent layers."""
    planes = [layout.states for layout in layouts if layout.states is not None]
    pieces, of_block, of_own = [], 0, 0
    counts = [plane.layers for plane in planes]
    for part in planes[stage].parts if planes else ():
        first, own = sum(counts[:stage]) * part.num_bytes, counts[stage] * part.num_bytes
        whole = PagePart(1, 0, of_block + first, own)
        pieces.append(PagePiece(whole, PagePart(1, 0, of_own, own)))
        of_block += sum(counts) * part.num_bytes
        of_own += own
    # `rows`, once for all layers, which only the last stage has.
    of_rows = sum(part.num_bytes for part in planes[stage].rows) if planes else 0
    if of_rows:
        whole = PagePart(1, 0, of_block, of_rows)
        pieces.append(PagePiece(whole, PagePart(1, 0, of_own, of_rows)))
    return pieces


class Rows(Protocol):
    """One memory of this host, or of its GPU: rows of bytes. Numbers and bytes are on the host.

    A GPU does what it is asked after all steps that this host has enqueued, on the stream of steps.
    Any thread may ask; threads launch kernels on another GPU unless they are told.
    """

    num_rows: int
    row_bytes: int

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n, row_bytes] uint8, contiguous."""
        ...

    def write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None: ...

    def digests(self, numbers: torch.Tensor) -> torch.Tensor:
        """[n] int64: what these rows add to the digests of the rows of all hosts."""
        ...


class PoolRows:
    """Rows of a tensor, [num_rows, row_bytes] uint8."""

    def __init__(self, rows: torch.Tensor, pieces: Sequence[PagePiece] = ()) -> None:
        self._rows, self._pieces = rows, pieces
        self.num_rows, self.row_bytes = rows.shape

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        with _on_device_of(self._rows):
            return on_host(self._rows.index_select(0, numbers.to(self._rows.device)))

    def write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        device = self._rows.device
        with _on_device_of(self._rows):
            self._rows.index_copy_(0, numbers.to(device), rows.to(device))

    def digests(self, numbers: torch.Tensor) -> torch.Tensor:
        with _on_device_of(self._rows):
            numbers = numbers.to(self._rows.device)
            found = torch.zeros_like(numbers)
            for whole, own in self._pieces:
                for index in range(own.num_ranges):
                    begin = own.begin + index * own.stride
                    first = (whole.begin + index * whole.stride) // _WORD
                    part = self._rows[:, begin : begin + own.size]
                    found += page_digests(part, numbers, first)
            return on_host(found)


class SharedRows:
    """Pages that the GPUs of this host divide, in memory that this rank's GPU maps.

    Args:
        pages: The host's share of pages.
        of_all: The same bytes, where they lie in the pages of all hosts.
    """

    def __init__(self, pages: DevicePages, of_all: DevicePages) -> None:
        self._pages, self._of_all = pages, of_all
        self.num_rows, self.row_bytes = len(pages.parts[0].pool), pages.page_bytes

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        device = self._pages.device
        with _on_device(device):
            out = torch.empty((len(numbers), self.row_bytes), dtype=torch.uint8, device=device)
            self._pages.gather(numbers.to(device), out)
            return on_host(out)

    def write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        device = self._pages.device
        with _on_device(device):
            self._pages.scatter(rows.to(device), numbers.to(device))
            Mark(device).wait()  # Steps of the other GPUs do not follow this stream.

    def digests(self, numbers: torch.Tensor) -> torch.Tensor:
        with _on_device(self._pages.device):
            return on_host(self._of_all.digests(numbers.to(self._pages.device)))


class BlockRows:
    """Blocks of recurrent layers as rows.

    Args:
        parts: [num_blocks, ...] each.
        is_shared: Whether other GPUs compute with them too.
    """

    def __init__(self, parts: Sequence[torch.Tensor], *, is_shared: bool = False) -> None:
        self._is_shared = is_shared
        self._parts = [part.view(len(part), -1).view(torch.uint8) for part in parts]
        self.num_rows = len(parts[0])
        self.row_bytes = sum(part.shape[1] for part in self._parts)

    def read(self, numbers: torch.Tensor) -> torch.Tensor:
        with _on_device_of(self._parts[0]):
            numbers = numbers.to(self._parts[0].device)
            rows = [part.index_select(0, numbers) for part in self._parts]
            return on_host(torch.cat(rows, dim=1))

    def write(self, numbers: torch.Tensor, rows: torch.Tensor) -> None:
        begin, device = 0, self._parts[0].device
        with _on_device_of(self._parts[0]):
            numbers, rows = numbers.to(device), rows.to(device)
            for part in self._parts:
                end = begin + part.shape[1]
                part.index_copy_(0, numbers, rows[:, begin:end])
                begin = end
            if self._is_shared:
                Mark(device).wait()

    def digests(self, numbers: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("blocks are checked in the pages that have them")


def memories_of(
    executor: LocalExecutor,
    layouts: Sequence[CacheLayout],
    stage: int,
    mirrored: torch.Tensor | None,
) -> dict[int, Rows]:
    """The memories of this host, by number.

    Args:
        layouts: Of all stages.
        mirrored: [n, MIRROR_ROW_BYTES], alike on all hosts; None: there is none.
    """
    pages, is_shared = executor.device_pages, not executor.device_pages.is_whole
    own: Rows = PoolRows(executor.page_rows, pieces_of_pages(layouts, stage))
    if is_shared:
        pools = [part.pool for part in pages.parts]
        own = SharedRows(pages, DevicePages(parts_of_stage(layouts, stage, pools)))
    found: dict[int, Rows] = {PAGES: own}
    if executor.states is not None:
        found[BLOCKS] = BlockRows(executor.states.of_blocks, is_shared=is_shared)
    if mirrored is not None:
        found[MIRRORED] = PoolRows(mirrored)
    return found


class OtherHosts:
    """Rank 0's access to the memories of the other hosts. Any thread may use it.

    Args:
        ends: Connections to the other hosts, in the order of the stages.
        wake: Called after a host was lost.
    """

    def __init__(
        self, ends: Sequence[socket.socket], group: HostGroup, wake: Callable[[], None]
    ) -> None:
        self._ends, self._group, self._wake = ends, group, wake
        self._lock = threading.Lock()
        self.num_frames = 0
        """Frames up to the newest order on pages, which requests follow."""

    def read(
        self,
        memory: int,
        numbers: Int64Array,
        row_bytes: Sequence[int],
        meanwhile: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Rows of each host, [n, row_bytes]. Raises RanksLost."""
        answers = [np.empty((len(numbers), size), np.uint8) for size in row_bytes]
        self._ask(_READ, memory, numbers, [b""] * len(self._ends), answers, meanwhile)
        return [torch.from_numpy(answer) for answer in answers]

    def write(
        self,
        memory: int,
        numbers: Int64Array,
        rows: Sequence[torch.Tensor],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes rows, [n, row_bytes] contiguous, of each host. Raises RanksLost."""
        answers = [np.empty(1, np.uint8) for _ in self._ends]
        data = [_bytes(part.numpy()) if part.numel() else b"" for part in rows]
        self._ask(_WRITE, memory, numbers, data, answers, meanwhile)

    def digests(
        self, memory: int, numbers: Int64Array, meanwhile: Callable[[], None]
    ) -> list[torch.Tensor]:
        """What the rows of each host add to digests, [n] int64. Raises RanksLost."""
        answers = [np.empty(len(numbers), np.int64) for _ in self._ends]
        self._ask(_DIGEST, memory, numbers, [b""] * len(self._ends), answers, meanwhile)
        return [torch.from_numpy(answer) for answer in answers]

    def _ask(
        self,
        operation: int,
        memory: int,
        numbers: Int64Array,
        data: Sequence[bytes | memoryview],
        answers: Sequence[NDArray[Any]],
        meanwhile: Callable[[], None],
    ) -> None:
        if not len(numbers):
            return
        request = _REQUEST.pack(operation, memory, self.num_frames, len(numbers))
        request += numbers.tobytes()
        with self._lock:
            try:
                for end, own in zip(self._ends, data, strict=True):
                    end.settimeout(self._group.limit_s)
                    end.sendall(request)
                    if own:
                        end.sendall(own)
                meanwhile()
                for end, answer in zip(self._ends, answers, strict=True):
                    receive_exactly(end, _bytes(answer))
            except OSError as error:
                self._lose(error)

    def _lose(self, error: OSError) -> None:
        """Raises RanksLost."""
        self._group.lose(f"pages of another host do not come: {error}", self._wake)
        raise RanksLost(self._group.reason) from error

    def close(self) -> None:
        for end in self._ends:
            end.close()


class HostPages(DevicePages):
    """Rows of all hosts, as rank 0 reads and writes them.

    Args:
        own: This host's rows.
        others: Stages and their hosts: the pieces of each, this host's excepted.
    """

    def __init__(
        self,
        memory: int,
        own: Rows,
        pieces: Sequence[PagePiece],
        others: Sequence[Sequence[PagePiece]],
        hosts: OtherHosts,
    ) -> None:
        self.parts: tuple[DevicePart, ...] = ()
        self.device = torch.device("cpu")
        self._memory, self._own, self._pieces = memory, own, pieces
        self._others, self._hosts = others, hosts
        self._sizes = [_row_bytes(each) for each in others]
        self.page_bytes = _row_bytes(pieces) + sum(self._sizes)

    @property
    def is_whole(self) -> bool:
        return False

    def gather(self, pages: torch.Tensor, out: torch.Tensor) -> None:
        numbers = pages.numpy()
        out = out[: len(numbers)]

        def mine() -> None:
            _put(self._pieces, self._own.read(pages), out)

        found = self._hosts.read(self._memory, numbers, self._sizes, mine)
        for pieces, rows in zip(self._others, found, strict=True):
            _put(pieces, rows, out)

    def scatter(self, source: torch.Tensor, pages: torch.Tensor) -> None:
        numbers = pages.numpy()
        source = source[: len(numbers)]
        rows = [
            _taken(pieces, source, size)
            for pieces, size in zip(self._others, self._sizes, strict=True)
        ]

        def mine() -> None:
            self._own.write(pages, _taken(self._pieces, source, self._own.row_bytes))

        self._hosts.write(self._memory, numbers, rows, mine)

    def digests(self, pages: torch.Tensor) -> torch.Tensor:
        own: list[torch.Tensor] = []
        found = self._hosts.digests(
            self._memory, pages.numpy(), lambda: own.append(self._own.digests(pages))
        )
        return torch.stack([*own, *found]).sum(dim=0)

    def read(self, page: int, out: torch.Tensor) -> None:
        self.gather(torch.tensor([page]), out.view(1, -1))

    def write(self, page: int, source: torch.Tensor) -> None:
        self.scatter(source.view(1, -1), torch.tensor([page]))


def _row_bytes(pieces: Sequence[PagePiece]) -> int:
    return sum(own.num_ranges * own.size for _, own in pieces)


def _put(pieces: Sequence[PagePiece], rows: torch.Tensor, out: torch.Tensor) -> None:
    for piece in pieces:
        _ranges(out, piece.whole).copy_(_ranges(rows, piece.own))


def _taken(pieces: Sequence[PagePiece], source: torch.Tensor, row_bytes: int) -> torch.Tensor:
    rows = torch.empty((len(source), row_bytes), dtype=torch.uint8)
    for piece in pieces:
        _ranges(rows, piece.own).copy_(_ranges(source, piece.whole))
    return rows


class Mirror:
    """Keeps memory alike on all hosts: sends the rows that rank 0 has changed to the others.

    Args:
        rows: [n, MIRROR_ROW_BYTES].
    """

    def __init__(self, rows: torch.Tensor, hosts: OtherHosts, num_others: int) -> None:
        whole = PagePart(1, MIRROR_ROW_BYTES, 0, MIRROR_ROW_BYTES)
        self._rows, self._memory = rows, PoolRows(rows, [PagePiece(whole, whole)])
        self._hosts, self._num_others = hosts, num_others
        self._sent = self._digests()

    def __call__(self) -> None:
        """Raises RanksLost."""
        digests = self._digests()
        (changed,) = np.nonzero(digests != self._sent)
        for first in range(0, len(changed), 1024):
            numbers = changed[first : first + 1024]
            rows = self._memory.read(torch.from_numpy(numbers))
            self._hosts.write(MIRRORED, numbers, [rows] * self._num_others)
        self._sent = digests

    def _digests(self) -> NDArray[np.uint64]:
        if self._rows.is_cuda:
            return self._memory.digests(torch.arange(len(self._rows))).numpy().view(np.uint64)
        rows = self._rows.numpy()
        return digest_pages(rows, np.arange(len(rows)))


def spread(executor: LocalExecutor, layouts: Sequence[CacheLayout], hosts: OtherHosts) -> None:
    """Makes rank 0's executor read and write whole pages and blocks, with those of other hosts."""
    stages = range(len(layouts))
    *before, last = (pieces_of_pages(layouts, stage) for stage in stages)
    own = memories_of(executor, layouts, stages[-1], None)
    executor.device_pages = HostPages(PAGES, own[PAGES], last, before, hosts)
    if executor.states is not None:
        *before, last = (pieces_of_blocks(layouts, stage) for stage in stages)
        executor.states.spread = HostPages(BLOCKS, own[BLOCKS], last, before, hosts)


def _bytes(array: NDArray[Any]) -> memoryview:
    numbers: Any = array
    return memoryview(numbers).cast("B")


def serve(end: socket.socket, group: HostGroup, memories: dict[int, Rows]) -> None:
    """Answers rank 0 in a thread, until the connection ends."""

    def run() -> None:
        try:
            while True:
                _answer(end, group, memories)
        except (OSError, RanksLost) as error:
            # Rank 0 is gone, or notices that this host is.
            logger.info("rank 0 asks for no more pages of this host: %s", error)
        except Exception:
            logger.exception("pages of this host cannot be read or written any more")
        finally:
            end.close()

    end.settimeout(None)
    threading.Thread(target=run, name="host-memory", daemon=True).start()


def _answer(end: socket.socket, group: HostGroup, memories: dict[int, Rows]) -> None:
    """Raises OSError; ConnectionError also for what is no request."""
    head = bytearray(_REQUEST.size)
    receive_exactly(end, memoryview(head))
    operation, memory, num_frames, count = _REQUEST.unpack(head)
    rows = memories.get(memory)
    if rows is None or not 0 < count <= rows.num_rows:
        raise ConnectionError(f"no request for {count} rows of memory {memory}")
    numbers = torch.empty(count, dtype=torch.int64)
    receive_exactly(end, _bytes(numbers.numpy()))
    if not 0 <= int(numbers.min()) <= int(numbers.max()) < rows.num_rows:
        raise ConnectionError(f"rows of memory {memory} beyond its {rows.num_rows}")
    data = torch.empty((count, rows.row_bytes), dtype=torch.uint8)
    if operation == _WRITE:
        receive_exactly(end, _bytes(data.numpy()))
    group.await_done(num_frames)
    with torch.inference_mode():
        if operation == _READ:
            answer = _bytes(rows.read(numbers).numpy())
        elif operation == _DIGEST:
            answer = _bytes(rows.digests(numbers).numpy())
        else:
            rows.write(numbers, data)
            answer = memoryview(b"\0")
    end.sendall(answer)
