"""Notifications and targets that accompany transfers, the checks of both, and errors of
transfers.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from weft.contract.errors import WeftError
from weft.contract.handle import LEASE_ID_BYTES, FillEvent, NixlTargetInfo
from weft.contract.layout import PagePart, PageShare
from weft.pages.transfer.digest import WORD_BYTES

MAX_METADATA_BYTES = 64 << 10
MAX_AGENT_NAME_CHARS = 256
MAX_PAGES = 2**31 - 1
"""Page numbers reach NIXL as 32-bit integers."""
MEMORY_TYPES = ("DRAM", "VRAM")

MAX_NOTIFIED_DIGESTS = 512
"""Most digests in a notification. UCX sends only small messages at once, and NIXL sends
no others.
"""

_NOTIFICATION = struct.Struct("<4sQ16sI")
_MAGIC = b"WFN1"
_REPORT = struct.Struct("<III")
_REPORT_MAGIC = b"WFN2"
_NO_COUNT = 2**32 - 1
_DIGEST_BYTES = 8


class TransferError(WeftError):
    """A transfer failed, or can no longer be followed. It must be requested again elsewhere."""

    reason = "TRANSFER_FAILED"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True

    def __init__(
        self, message: str, *, may_still_arrive: bool = False, worker_id: str = ""
    ) -> None:
        super().__init__(message, stage="transfer", worker_id=worker_id)
        self.may_still_arrive = may_still_arrive
        """Whether NIXL may continue the transfer. Destroying the agent (`close_peer`) ends that,
        except for writes that the kernel has taken: their destinations stay in quarantine.
        """


class TransportMismatch(TransferError):
    """The two sides cannot communicate over NIXL, or a transfer does not fit them. Nothing was
    posted.
    """

    reason = "TRANSPORT_MISMATCH"
    grpc_code = "FAILED_PRECONDITION"
    retryable = False


class NoOneSidedLane(TransportMismatch):
    """A read would need the help of the process being read, which might not survive it."""


@dataclass(frozen=True, slots=True)
class Notification:
    """Reports that all bytes of a chunk are in the owner's pool. Bound to the chunk's write."""

    owner_epoch: int
    lease_id: bytes
    chunk: int
    """Number of the chunk in the fill, from 0."""
    report: FillEvent | None = None
    """The chunk's `written` event, if the notification carries it."""

    @classmethod
    def parse(cls, message: bytes) -> Notification | None:
        """The notification in `message`, or None if it is not one."""
        head, rest = message[: _NOTIFICATION.size], message[_NOTIFICATION.size :]
        if len(head) != _NOTIFICATION.size:
            return None
        magic, owner_epoch, lease_id, chunk = _NOTIFICATION.unpack(head)
        if magic == _MAGIC and not rest:
            return cls(owner_epoch, lease_id, chunk)
        num_digests, odd = divmod(len(rest) - _REPORT.size, _DIGEST_BYTES)
        if magic != _REPORT_MAGIC or odd or not 0 < num_digests <= MAX_NOTIFIED_DIGESTS:
            return None
        start_token, end_token, computed = _REPORT.unpack_from(rest)
        report = FillEvent(
            kind="written",
            chunk=chunk,
            start_token=start_token,
            end_token=end_token,
            digests=list(struct.unpack_from(f"<{num_digests}Q", rest, _REPORT.size)),
            computed_tokens=None if computed == _NO_COUNT else computed,
        )
        return cls(owner_epoch, lease_id, chunk, report)


def encode_notification(
    owner_epoch: int, lease_id: bytes, chunk: int, report: FillEvent | None = None
) -> bytes:
    """Encodes a notification: magic, epoch (u64), lease, chunk (u32), little-endian, 32 bytes.

    With the chunk's report its range (2 u32), the computed tokens (u32, or all ones) and its
    digests (u64 each, 1 to `MAX_NOTIFIED_DIGESTS`) follow.

    Raises:
        ValueError: A field is out of its range.
    """
    if len(lease_id) != LEASE_ID_BYTES:
        raise ValueError(f"lease_id must have {LEASE_ID_BYTES} bytes, not {len(lease_id)}")
    try:
        if report is None:
            return _NOTIFICATION.pack(_MAGIC, owner_epoch, lease_id, chunk)
        digests = report.digests
        if not 0 < len(digests) <= MAX_NOTIFIED_DIGESTS:
            raise ValueError(f"{len(digests)} digests in a notification")
        head = _NOTIFICATION.pack(_REPORT_MAGIC, owner_epoch, lease_id, chunk)
        computed = _NO_COUNT if report.computed_tokens is None else report.computed_tokens
        about = _REPORT.pack(report.start_token, report.end_token, computed)
        return head + about + struct.pack(f"<{len(digests)}Q", *digests)
    except struct.error as error:
        raise ValueError(f"notification out of range: {error}") from error


def metadata_digest(metadata: bytes) -> bytes:
    """BLAKE2b-256 of agent metadata, which itself holds no checksum."""
    return hashlib.blake2b(metadata, digest_size=32).digest()


def check_target(target: NixlTargetInfo, *, version: str, page_bytes: int) -> None:
    """Checks a peer's description of its pool before NIXL dials the addresses in its metadata.
    `version` of nixl and `page_bytes` are this side's.

    Raises:
        TransportMismatch: A field does not fit; the message names it.
    """

    def require(condition: bool, message: str) -> None:
        if not condition:
            raise TransportMismatch(f"target of agent '{target.agent_name[:80]}': {message}")

    # Another version may accept our metadata and misread it, so that the first write fails.
    require(
        target.version == version, f"nixl {target.version[:40]} there, {version} here: must equal"
    )
    require(0 < len(target.agent_name) <= MAX_AGENT_NAME_CHARS, "bad length of agent_name")
    require(0 < len(target.agent_metadata) <= MAX_METADATA_BYTES, "bad length of agent_metadata")
    require(
        metadata_digest(target.agent_metadata) == target.agent_metadata_digest,
        "agent_metadata does not have the digest given for it",
    )
    require(target.memory_type in MEMORY_TYPES, f"memory_type must be one of {MEMORY_TYPES}")
    require(0 <= target.device_id < 2**16, f"device_id {target.device_id} out of range")
    require(
        target.page_bytes == page_bytes,
        f"pages of {target.page_bytes} bytes there, {page_bytes} here",
    )
    require(0 < target.num_pages <= MAX_PAGES, f"num_pages {target.num_pages} out of range")
    require(
        0 < target.base_address <= 2**64 - target.page_bytes * target.num_pages,
        "the pool does not fit the address space",
    )


def check_pages(
    sources: Sequence[int],
    destinations: Sequence[int],
    *,
    num_sources: int,
    num_destinations: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Converts the page numbers (sources, destinations) of a transfer to NIXL's form. Sources are
    in the pool that is read, destinations in the pool that is written.

    Raises:
        TransportMismatch: Counts differ or are 0, a number is out of range, or a destination is
            named twice.
    """
    source, destination = np.asarray(sources), np.asarray(destinations)
    if source.shape != destination.shape or source.ndim != 1 or source.size == 0:
        raise TransportMismatch(
            f"{source.shape} source pages for {destination.shape} destination pages"
        )
    for side, pages, num_pages in (
        ("source", source, num_sources),
        ("destination", destination, num_destinations),
    ):
        if not np.issubdtype(pages.dtype, np.integer):
            raise TransportMismatch(f"{side} pages must be integers, not {pages.dtype}")
        if pages.min() < 0 or pages.max() >= num_pages:
            raise TransportMismatch(
                f"{side} pages {pages.min()}..{pages.max()} are not all in a pool of {num_pages}"
            )
    ordered = np.sort(destination)
    if (ordered[1:] == ordered[:-1]).any():
        raise TransportMismatch("a destination page is named twice")
    return source.astype(np.int32), destination.astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRegion:
    """A pool of pages in this process, described for NIXL: one range of memory."""

    address: int
    """Address of page 0."""
    page_bytes: int
    """Bytes from one page to the next."""
    num_pages: int
    share: PageShare | None = None
    """What the pool has of each page, if other hosts have the rest; None: whole pages."""
    memory_type: str = "DRAM"
    device_id: int = 0
    """Device ordinal, for VRAM."""
    keep_alive: object = None
    """Owner of the memory; kept until the agent that registered it is destroyed."""
    settle: Callable[[], None] | None = None
    """Waits until this process's device has finished its copies; None: no device copies. Raises
    TransferError if that takes too long. Enqueued copies outlive the agent that enqueued them.
    """

    def __post_init__(self) -> None:
        if self.memory_type not in MEMORY_TYPES:
            raise ValueError(f"memory_type must be one of {MEMORY_TYPES}, not {self.memory_type}")
        if self.address <= 0 or self.page_bytes <= 0 or self.page_bytes % WORD_BYTES:
            raise ValueError("a pool needs an address and a page size that is a multiple of 8")
        if not 0 < self.num_pages <= MAX_PAGES:
            raise ValueError(f"num_pages {self.num_pages} out of range")

    @classmethod
    def of_array(cls, pool: NDArray[np.uint8]) -> PoolRegion:
        """Region of a C-contiguous uint8 array `[num_pages, page_bytes]`."""
        if pool.dtype != np.uint8 or pool.ndim != 2 or not pool.flags.c_contiguous:
            raise ValueError("pool must be contiguous uint8 [num_pages, page_bytes]")
        num_pages, page_bytes = pool.shape
        return cls(
            address=pool.ctypes.data,
            page_bytes=page_bytes,
            num_pages=num_pages,
            keep_alive=pool,
        )

    @property
    def has_device(self) -> bool:
        """Whether a device of this process copies from or to the pool."""
        return self.memory_type != "DRAM" or self.settle is not None

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages

    @property
    def whole_bytes(self) -> int:
        """Bytes of a whole page, as peers have it."""
        return self.page_bytes if self.share is None else self.share.page_bytes

    def ranges(self) -> tuple[list[ByteRange], list[ByteRange]]:
        """What the pool has of a page: ranges of its own rows, and the same ranges of whole
        pages.
        """
        if self.share is None:
            return [ByteRange(0, self.page_bytes)], [ByteRange(0, self.page_bytes)]
        own = [one for piece in self.share.pieces for one in _ranges(piece.own)]
        return own, [one for piece in self.share.pieces for one in _ranges(piece.whole)]


class ByteRange(NamedTuple):
    begin: int
    size: int


def _ranges(part: PagePart) -> list[ByteRange]:
    begins = (part.begin + number * part.stride for number in range(part.num_ranges))
    return [ByteRange(begin, part.size) for begin in begins]


def strided_rows(
    address: int, page_bytes: int, num_pages: int, device_id: int, ranges: Sequence[ByteRange]
) -> NDArray[np.uint64]:
    """Ranges of each page of a pool as descriptors, uint64 `[len(ranges), 5]`: (address, length,
    device, stride, count).
    """
    rows = [(address + one.begin, one.size, device_id, page_bytes, num_pages) for one in ranges]
    return np.array(rows, dtype=np.uint64)


def descriptor_numbers(
    pages: NDArray[np.int32], num_pages: int, num_ranges: int
) -> NDArray[np.int32]:
    """Indices of the descriptors of these pages in `strided_rows`, range by range."""
    firsts = np.arange(num_ranges, dtype=np.int32) * np.int32(num_pages)
    numbers: NDArray[np.int32] = np.add.outer(firsts, pages).reshape(-1)
    return numbers
