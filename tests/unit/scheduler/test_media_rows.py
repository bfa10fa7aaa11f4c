"""Rows of media: who has them, and when they may be overwritten."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from weft.contract.arrays import Int64Array
from weft.contract.errors import InvalidRequest, MediaMissing
from weft.contract.spans import Media, MediaSpan
from weft.engine.requests.media_axes import MediaAxes
from weft.engine.requests.media_positions import MediaPositions
from weft.engine.requests.media_rows import (
    GROUP_ROWS,
    EncoderFacts,
    FilledMedia,
    MediaRows,
    check_media,
)
from weft.engine.requests.media_store import MediaStore
from weft.engine.requests.request import Request

FACTS = EncoderFacts(rows_of=lambda shape: shape[0], cost_of=lambda shape: shape[0])


@dataclass
class Asked:
    """What `MediaRows` knows of a request."""

    spans: list[MediaSpan]
    num_done: int = 0
    num_tokens: int = 0
    axes: MediaPositions | None = None
    tail_spans: tuple[MediaSpan, ...] = ()


def medium(name: int, num_rows: int) -> Media:
    return Media.of("image", "test", (num_rows, 1, 1), bytes([name % 256]) * num_rows)


def span_of(one: Media, position: int) -> MediaSpan:
    return MediaSpan(position=position, length=one.shape[0], digest=one.digest)


@dataclass
class Device:
    """Memory of rows: which medium's which row lies at each place."""

    rows: dict[int, tuple[bytes, int]] = field(default_factory=dict)

    def encode(self, due: Sequence[tuple[Media, Int64Array]]) -> None:
        for one, places in due:
            for row, place in enumerate(places.tolist()):
                self.rows[place] = (one.digest, row)


@pytest.mark.parametrize("seed", range(5))
def test_steps_read_the_rows_of_their_media(seed: int) -> None:
    """Random requests in steps that overlap: each chunk's rows are those of its media when the step
    begins, and still when it ends. All requests end.
    """
    draw = random.Random(seed)
    store = MediaStore(1 << 20)
    media = MediaRows(store, FACTS, 8 * GROUP_ROWS, max_step_cost=40, max_step_tokens=100)
    device, known = Device(), [medium(n, draw.randint(1, 3 * GROUP_ROWS)) for n in range(12)]
    requests = []
    for _ in range(20):
        spans, position = [], draw.randrange(5)
        for one in draw.choices(known, k=draw.randint(0, 6)):
            store.put(one)
            spans.append(span_of(one, position))
            position += one.shape[0] + draw.randrange(3)
        requests.append(Asked(spans, 0, position + draw.randint(1, 9)))
        media.check(spans, requests[-1].num_tokens)
        media.begin(cast(Request, requests[-1]))
    flying: list[tuple[int, list[tuple[Asked, int, int]]]] = []

    def check(chunks: list[tuple[Asked, int, int]]) -> None:
        for request, first, end in chunks:
            wanted = {
                span.position + row: (span.digest, row)
                for span in request.spans
                for row in range(span.length)
                if first <= span.position + row < end
            }
            found = {}
            for behind, places in media.places_in(cast(Request, request), first, end):
                for at, place in zip(behind.tolist(), places.tolist(), strict=True):
                    found[first + at] = device.rows[place]
            assert found == wanted

    number = 0
    while requests or flying:
        if requests:
            media.begin_plan(has_running=draw.random() < 0.5)
            chunks = []
            for request in draw.sample(requests, min(3, len(requests))):
                left = request.num_tokens - request.num_done
                wanted = min(left, draw.randint(1, 40))
                count = media.limit(cast(Request, request), request.num_done, wanted)
                if count:
                    chunks.append((request, request.num_done, request.num_done + count))
            number += 1
            media.begin_step(number)
            media.encode(device.encode)
            check(chunks)
            flying.append((number, chunks))
            for request, _, end in chunks:
                request.num_done = end
        if len(flying) == 2 or not requests:
            ended, chunks = flying.pop(0)
            check(chunks)
            media.end_step(ended)
        for request in [one for one in requests if one.num_done == one.num_tokens]:
            requests.remove(request)
            media.end(cast(Request, request))
        assert number < 10_000
    assert media.sizes()["media_steps"] == 0


def test_what_a_request_needs_is_not_dropped() -> None:
    store = MediaStore(100)
    needed, other, third = medium(1, 40), medium(2, 40), medium(3, 40)
    store.put(needed)
    store.pin([span_of(needed, 0)])
    store.put(other)
    store.put(third)  # There is room for two: the one that nobody needs goes.
    store.check([span_of(needed, 0), span_of(third, 40)])
    with pytest.raises(MediaMissing):
        store.check([span_of(other, 0)])
    store.unpin([span_of(needed, 0)])
    store.put(medium(4, 90))
    assert len(store) == 1
    assert store.num_bytes == 90


def test_a_medium_that_can_never_have_rows_is_refused() -> None:
    store = MediaStore(1 << 20)
    media = MediaRows(store, FACTS, 2 * GROUP_ROWS, max_step_cost=10, max_step_tokens=100)
    large = medium(1, 3 * GROUP_ROWS)
    store.put(large)
    with pytest.raises(InvalidRequest, match=f"{3 * GROUP_ROWS} rows.*room for {2 * GROUP_ROWS}"):
        media.check([span_of(large, 0)], 100)
    small = medium(2, 5)
    store.put(small)
    with pytest.raises(InvalidRequest, match="5 rows"):
        media.check([MediaSpan(position=0, length=5, digest=small.digest, offset=1)], 100)


def test_media_whose_tokens_see_one_another_are_whole_and_within_a_step() -> None:
    store, facts = MediaStore(1 << 20), FACTS._replace(sees_both_ways=True)
    media = MediaRows(store, facts, 9 * GROUP_ROWS, max_step_cost=10, max_step_tokens=60)
    large, small = medium(1, 61), medium(2, 60)
    for one in (large, small):
        store.put(one)
    media.check([span_of(small, 3)], 100)
    with pytest.raises(InvalidRequest, match="61 tokens"):
        media.check([span_of(large, 3)], 100)
    with pytest.raises(InvalidRequest, match="60 rows, all of which"):
        media.check([MediaSpan(position=0, length=59, digest=small.digest)], 100)


def test_without_an_encoder_media_are_refused() -> None:
    check_media(None, [], 10)
    with pytest.raises(InvalidRequest, match="no images"):
        check_media(None, [span_of(medium(1, 2), 0)], 10)


def test_a_medium_that_could_not_be_encoded_is_encoded_again() -> None:
    store = MediaStore(1 << 20)
    media, device = (
        MediaRows(store, FACTS, 4 * GROUP_ROWS, max_step_cost=10, max_step_tokens=100),
        Device(),
    )
    one = medium(1, 3 * GROUP_ROWS)
    store.put(one)
    request = cast(Request, Asked([span_of(one, 0)], 0, 60))
    media.begin(request)

    def fail(due: Sequence[tuple[Media, Int64Array]]) -> None:
        raise RuntimeError("no memory")

    media.begin_plan(has_running=False)
    assert media.limit(request, 0, 60) == 60
    media.begin_step(1)
    with pytest.raises(RuntimeError):
        media.encode(fail)
    media.end_step(1)
    media.begin_plan(has_running=False)
    assert media.limit(request, 0, 60) == 60
    media.begin_step(2)
    media.encode(device.encode)
    ((_, places),) = media.places_in(request, 0, 60)
    assert [device.rows[place] for place in places.tolist()] == [
        (one.digest, row) for row in range(3 * GROUP_ROWS)
    ]


def grid_of(shape: Sequence[int]) -> tuple[int, int]:
    """Of squares of 2 x 2 pixels."""
    if len(shape) != 3:
        raise InvalidRequest("no picture", stage="validate", param="spans")
    return shape[0] // 2, shape[1] // 2


def test_without_a_tower_spans_tell_where_media_turn() -> None:
    """Positions are those of a worker that has the media; what a span says of them must fit."""
    one = Media.of("image", "test", (4, 6, 3), bytes(72))
    span = MediaSpan(position=3, length=6, digest=one.digest, shape=one.shape)
    filled, whole = FilledMedia(MediaAxes(grid_of)), Asked([span], 0, 20)
    filled.check([span], 20)
    filled.begin(cast(Request, whole))
    store = MediaStore(1 << 20)
    store.put(one)
    sizes = {"max_step_cost": 40, "max_step_tokens": 100}
    media = MediaRows(store, FACTS, 8 * GROUP_ROWS, **sizes, axes=MediaAxes(grid_of))
    other = Asked([replace(span, shape=())], 0, 20)
    media.begin(cast(Request, other))
    assert whole.axes is not None
    assert other.axes is not None
    assert whole.axes.of(0, 20).tolist() == other.axes.of(0, 20).tolist()
    for wrong in (replace(span, shape=()), replace(span, shape=(4, 4, 3)), replace(span, offset=1)):
        with pytest.raises(InvalidRequest):
            filled.check([wrong], 20)
    with pytest.raises(InvalidRequest, match="its span says"):
        media.check([replace(span, shape=(6, 4, 3))], 20)


def test_running_requests_do_not_wait_for_an_encoder_and_its_rows_at_once() -> None:
    store, device = MediaStore(1 << 20), Device()
    media = MediaRows(store, FACTS, 8 * GROUP_ROWS, max_step_cost=40, max_step_tokens=100)
    one = medium(1, random.randint(1, GROUP_ROWS))
    store.put(one)
    asked = Asked([span_of(one, 3)], 0, 3 + one.shape[0] + 5)
    request = cast(Request, asked)
    media.begin(request)
    for turn, found in enumerate([3, asked.num_tokens, asked.num_tokens]):
        media.begin_plan(has_running=True)
        assert not media.fills_step
        assert media.limit(request, 0, asked.num_tokens) == found
        assert media.fills_step == (turn == 1), "no other prompt joins it"
        media.encode(device.encode)
        media.begin_step(turn)
    assert media.num_encoded == 1
