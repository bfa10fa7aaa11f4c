"""Media that come in parts: whole, in their order, and only with the content of their digests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence

import pytest
from weft.common.media_stream import PART_BYTES, media_of, parts_of
from weft.contract.errors import InvalidRequest
from weft.contract.spans import Media, MediaKind
from weft.v1 import worker_pb2

Part = worker_pb2.PutMediaRequest


def medium(num_bytes: int, kind: MediaKind = "image") -> Media:
    return Media.of(kind, "test", (num_bytes, 1, 1), random.randbytes(num_bytes))


async def received(parts: Sequence[Part]) -> list[Media]:
    async def stream() -> AsyncIterator[Part]:
        for part in parts:
            yield part

    return [one async for one in media_of(stream())]


async def test_media_arrive_whole_and_in_order() -> None:
    sizes = (1, PART_BYTES, 2 * PART_BYTES + 7, PART_BYTES - 1)
    media = [*map(medium, sizes), medium(400, "audio")]
    parts = list(parts_of(media))
    assert len(parts) == 7
    assert await received(parts) == media


async def test_other_content_is_refused() -> None:
    """Wherever it differs, and whatever of its description does."""
    whole = list(parts_of([medium(2 * PART_BYTES + 9)]))
    for number, place in enumerate((5, PART_BYTES - 1, 3)):
        parts = [Part.FromString(part.SerializeToString()) for part in whole]
        data = bytearray(parts[number].data)
        data[place] ^= 1
        parts[number].data = bytes(data)
        with pytest.raises(InvalidRequest, match="not that of its digest"):
            await received(parts)
    (part,) = parts_of([medium(12)])
    for field, value in {"kind": "audio", "processor": "other", "digest": bytes(32)}.items():
        other = Part.FromString(part.SerializeToString())
        setattr(other.head, field, value)
        with pytest.raises(InvalidRequest, match="not that of its digest"):
            await received([other])
    turned = Part.FromString(part.SerializeToString())
    turned.head.shape[:] = [1, 12, 1]
    with pytest.raises(InvalidRequest, match="not that of its digest"):
        await received([turned])


async def test_parts_that_make_no_medium_are_refused() -> None:
    first, second, last = parts_of([medium(2 * PART_BYTES + 9)])
    (small,) = parts_of([medium(3)])
    for parts, problem in (
        ([first, second], f"has {2 * PART_BYTES} of {2 * PART_BYTES + 9} bytes"),
        ([first, small], f"ends after {PART_BYTES}"),
        ([second], "belong to no medium"),
        ([first, second, last, last], "belong to no medium"),
        ([Part(head=Part.Head(kind="film", shape=[1]), data=b"x")], "of kind 'film'"),
        ([Part(head=Part.Head(kind="image", shape=[1 << 30]), data=b"x")], "at most"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            await received(parts)
