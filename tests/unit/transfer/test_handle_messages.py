"""Handles on the wire: what an owner says is what its filler gets, within bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from weft.contract.codec.pairs import HANDLE as CODEC
from weft.contract.codec.pairs import event_from_proto, event_to_proto
from weft.contract.errors import InvalidRequest
from weft.contract.handle import FillEvent, FillTimings, KvHandle, NixlTargetInfo
from weft.contract.spans import MediaSpan
from weft.contract.token_ids import token_ids
from weft.v1 import kv_pb2

HANDLE = KvHandle(
    owner_id="decode-0",
    owner_epoch=2**64 - 5,
    lease_id=bytes(range(16)),
    lease_s=10.5,
    namespace=bytes(32),
    cache_salt="salt",
    page_size=16,
    tokens=token_ids(range(48)),
    start_token=16,
    end_token=48,
    pages=[7, 9],
    filler_epoch=3,
    nixl=NixlTargetInfo(
        version="1",
        agent_name="a",
        agent_metadata=b"m",
        agent_metadata_digest=bytes(32),
        base_address=2**40,
        page_bytes=1024,
        num_pages=50,
        max_notified_digests=9,
    ),
    priority=-12,
    tenant="acme",
    block_pages=5,
    spans=[MediaSpan(position=40, length=8, digest=bytes(32), offset=2, shape=(4, 6, 3))],
    tail_spans=[MediaSpan(position=47, length=3, digest=bytes(32), offset=9, shape=(4, 6, 3))],
    encoder_digest=bytes(range(32)),
)


def test_a_handle_survives_the_wire() -> None:
    """Also with many pages behind those of its tokens, as a long window takes."""
    for handle in (HANDLE, replace(HANDLE, pages=[7, 9, *range(100, 100_100)])):
        message = kv_pb2.KvHandle.FromString(CODEC.encode(handle).SerializeToString())
        assert CODEC.decode(message) == handle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("priority", 1_000_001),
        ("priority", -1_000_001),
        ("tenant", "t" * 65),
        ("lease_id", b"x"),
        ("token_words", bytes(4 * 48 - 1)),
    ],
)
def test_what_is_out_of_bounds_is_refused(field: str, value: object) -> None:
    message = CODEC.encode(HANDLE)
    setattr(message, field, value)
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(message)
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("planes", lambda m: m.planes.append("draft")),
        ("planes", lambda m: m.ClearField("planes")),
        ("adapter", lambda m: setattr(m.adapter, "digest", bytes(33))),
        ("adapter", lambda m: m.adapter.SetInParent()),
        ("page_runs", lambda m: m.page_runs.add(first_page=1, num_pages=(1 << 20) + 49)),
    ],
)
def test_malformed_parts_are_refused(
    field: str, change: Callable[[kv_pb2.KvHandle], object]
) -> None:
    message = CODEC.encode(HANDLE)
    change(message)
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(message)
    assert caught.value.param == field


def test_what_is_absent_from_a_handle() -> None:
    handle = replace(HANDLE, nixl=None, adapter=bytes(range(32)))
    message = CODEC.encode(handle)
    assert not message.HasField("nixl")
    assert CODEC.decode(message) == handle
    assert not CODEC.encode(HANDLE).HasField("adapter")


EVENTS = [
    FillEvent(
        kind="accepted",
        filler_epoch=2**64 - 1,
        transport="nixl",
        cached_tokens=16,
        start_token=16,
        end_token=48,
    ),
    FillEvent(kind="declined", reason="too_long", message="why"),
    FillEvent(kind="written", chunk=1, start_token=16, end_token=32, digests=[2**64 - 1, 0]),
    FillEvent(kind="written", digests=[5], computed_tokens=0),
    FillEvent(kind="data", chunk=2, start_token=32, offset=2**40, data=b"bytes"),
    FillEvent(kind="stopped"),
    FillEvent(
        kind="done",
        timings=FillTimings(
            queued_s=0.25,
            first_write_posted_s=0.5,
            last_chunk_computed_s=1.75,
            last_write_complete_s=2.5,
            computed_tokens=9,
            bytes=2**40,
        ),
    ),
    FillEvent(kind="failed", message="why", is_stopped=True),
    FillEvent(kind="failed", needs_fence=True),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_survives_the_wire(event: FillEvent) -> None:
    message = kv_pb2.FillEvent.FromString(event_to_proto(event).SerializeToString())
    assert message.WhichOneof("event") == event.kind
    assert event_from_proto(message) == event


def test_what_fillers_say_besides() -> None:
    """Planes for other versions, and that a failed fill may be tried again."""
    assert list(event_to_proto(EVENTS[0]).accepted.planes) == ["target"]
    assert event_to_proto(EVENTS[4]).data.plane == "target"
    error = event_to_proto(EVENTS[7]).failed.error
    assert (error.code, error.retryable, error.stage) == ("FILL_FAILED", True, "fill")


def test_a_filler_may_leave_times_out() -> None:
    done = kv_pb2.FillEvent(done={})
    assert event_from_proto(done) == FillEvent(kind="done", timings=FillTimings())


def test_what_a_later_version_says() -> None:
    assert event_from_proto(kv_pb2.FillEvent()).kind == "broken"
    declined = kv_pb2.FillEvent(declined={"reason": 77, "message": "why"})
    assert event_from_proto(declined) == FillEvent(kind="declined", message="why")
    accepted = kv_pb2.FillEvent(accepted={"transport": 77})
    assert event_from_proto(accepted) == FillEvent(kind="accepted")


def test_tokens_come_in_either_form_and_not_in_both() -> None:
    message = CODEC.encode(HANDLE)
    message.tokens.ids.extend(HANDLE.tokens)
    with pytest.raises(InvalidRequest) as caught:
        CODEC.decode(message)
    assert caught.value.param == "token_words"
    message.token_words = b""
    assert CODEC.decode(message) == HANDLE
