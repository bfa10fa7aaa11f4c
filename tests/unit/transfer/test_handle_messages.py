"""Handles on the wire: what an owner says is what its filler gets, within bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from weft.common.worker.fills import handle_from_proto, start_to_proto
from weft.contract.errors import InvalidRequest
from weft.contract.handle import KvHandle, NixlTargetInfo
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
)


def test_a_handle_survives_the_wire() -> None:
    """Also with many pages behind those of its tokens, as a long window takes."""
    for handle in (HANDLE, replace(HANDLE, pages=[7, 9, *range(100, 100_100)])):
        message = kv_pb2.FillControl.FromString(start_to_proto(handle).SerializeToString())
        assert handle_from_proto(message.start.handle) == handle


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
    message = start_to_proto(HANDLE).start.handle
    setattr(message, field, value)
    with pytest.raises(InvalidRequest) as caught:
        handle_from_proto(message)
    assert caught.value.param == field


def test_tokens_come_in_either_form_and_not_in_both() -> None:
    message = start_to_proto(HANDLE).start.handle
    message.tokens.ids.extend(HANDLE.tokens)
    with pytest.raises(InvalidRequest) as caught:
        handle_from_proto(message)
    assert caught.value.param == "token_words"
    message.token_words = b""
    assert handle_from_proto(message) == HANDLE
