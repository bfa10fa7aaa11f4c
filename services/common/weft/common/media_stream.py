"""Processed media as the parts of a `PutMedia` call, and back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import get_args

from weft.contract.errors import InvalidRequest
from weft.contract.spans import Media, MediaKind, media_digest
from weft.v1 import worker_pb2

PART_BYTES = 1 << 20
"""Most bytes of content in one part."""
MAX_MEDIUM_BYTES = 64 << 20


def parts_of(media: Sequence[Media]) -> Iterator[worker_pb2.PutMediaRequest]:
    """The parts of several media, one after another."""
    for one in media:
        head = worker_pb2.PutMediaRequest.Head(
            digest=one.digest, kind=one.kind, processor=one.processor, shape=one.shape
        )
        for start in range(0, max(1, len(one.data)), PART_BYTES):
            data = one.data[start : start + PART_BYTES]
            yield worker_pb2.PutMediaRequest(head=None if start else head, data=data)


async def media_of(
    parts: AsyncIterator[worker_pb2.PutMediaRequest],
) -> AsyncIterator[Media]:
    """Yields each medium once all of it has come. Raises InvalidRequest for parts that make none,
    or whose content is not what its digest names.
    """
    head, data = worker_pb2.PutMediaRequest.Head(), bytearray()
    size = -1
    async for part in parts:
        if part.HasField("head"):
            if size >= 0:
                raise _refused(f"a medium of {size} bytes ends after {len(data)}")
            head, data, size = part.head, bytearray(), math.prod(part.head.shape)
            if head.kind not in get_args(MediaKind) or not 0 < size <= MAX_MEDIUM_BYTES:
                raise _refused(
                    f"a medium of kind {head.kind[:40]!r} and {size} bytes; media of at most "
                    f"{MAX_MEDIUM_BYTES} are taken"
                )
        if size < 0 or len(data) + len(part.data) > size:
            raise _refused("a part has bytes that belong to no medium")
        data += part.data
        if len(data) == size:
            yield await asyncio.to_thread(_checked, head, bytes(data))
            size = -1
    if size >= 0:
        raise _refused(f"the last medium has {len(data)} of {size} bytes")


def _checked(head: worker_pb2.PutMediaRequest.Head, data: bytes) -> Media:
    kind: MediaKind = "audio" if head.kind == "audio" else "image"
    if media_digest(kind, head.processor, head.shape, data) != head.digest:
        raise _refused("the content of a medium is not that of its digest")
    return Media(
        kind=kind,
        processor=head.processor,
        shape=tuple(head.shape),
        data=data,
        digest=head.digest,
    )


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(problem, stage="validate", param="media")
