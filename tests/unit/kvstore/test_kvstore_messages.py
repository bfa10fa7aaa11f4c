"""What a store accepts from the network."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from weft.contract.codec.pairs import LOOKUP, PUT
from weft.contract.errors import InvalidRequest
from weft.contract.store import MAX_LOOKUP_KEYS
from weft.kvstore.page_arena import PageArena
from weft.kvstore.puts import check_part
from weft.testing.services.kv_chain import Chain, put_header
from weft.v1 import kv_pb2, kvstore_pb2

Change = Callable[[kvstore_pb2.PutRequest], object]


def a_put() -> kvstore_pb2.PutRequest:
    chain = Chain(3)
    digests = [random.getrandbits(64) for _ in range(3)]
    return put_header(chain, range(3), digests, [5, 4, 9], 4096)


def test_put_is_taken_as_it_is() -> None:
    message = a_put()
    order = PUT.decode(message)
    assert [(o.key, o.digest, o.source_page) for o in order.offers] == [
        (page.key, page.digest, page.page) for page in message.pages
    ]
    assert (order.source_id, order.source_epoch, order.page_bytes) == ("test-worker", 7, 4096)
    assert order.source is None
    message.source.CopyFrom(kv_pb2.NixlTarget(num_pages=3))
    source = PUT.decode(message).source
    assert source is not None
    assert source.num_pages == 3


BAD_PUTS: dict[str, Change] = {
    "namespace has 31": lambda m: setattr(m, "namespace", bytes(31)),
    "source_id has 0": lambda m: setattr(m, "source_id", ""),
    "source_id has 300": lambda m: setattr(m, "source_id", "x" * 300),
    "page_bytes = 0": lambda m: setattr(m, "page_bytes", 0),
    "page_bytes = 4098": lambda m: setattr(m, "page_bytes", 4098),
    "pages has 0": lambda m: m.ClearField("pages"),
    "pages has 1026": lambda m: m.pages.extend(
        kvstore_pb2.PutPage(key=random.randbytes(32)) for _ in range(1023)
    ),
    "key has 31": lambda m: setattr(m.pages[1], "key", bytes(31)),
    "twice": lambda m: m.pages.append(m.pages[0]),
}


@pytest.mark.parametrize("message", BAD_PUTS)
def test_malformed_put_is_refused(message: str) -> None:
    put = a_put()
    BAD_PUTS[message](put)
    with pytest.raises(InvalidRequest, match=message):
        PUT.decode(put)


def test_lookup_is_bounded() -> None:
    keys = [bytes(32)] * (MAX_LOOKUP_KEYS + 1)
    request = kvstore_pb2.LookupRequest(namespace=bytes(32), keys=keys[:-1])
    assert len(LOOKUP.decode(request, lookup=0).keys) == MAX_LOOKUP_KEYS
    bad = [
        kvstore_pb2.LookupRequest(namespace=bytes(32), keys=keys),
        kvstore_pb2.LookupRequest(namespace=bytes(32), keys=[bytes(33)]),
        kvstore_pb2.LookupRequest(namespace=b"", keys=[bytes(32)]),
    ]
    for request in bad:
        with pytest.raises(InvalidRequest):
            LOOKUP.decode(request, lookup=0)


def test_pieces_of_a_page_must_follow_one_another() -> None:
    order = PUT.decode(a_put())
    part = kvstore_pb2.PutDataRequest
    check_part(part(index=1, offset=100, data=bytes(3996)), order, [0, 100, 0])
    bad = [
        part(index=3, data=b"x"),
        part(index=1, offset=99, data=b"x"),
        part(index=1, offset=101, data=b"x"),
        part(index=1, offset=100, data=bytes(3997)),
        part(index=1, offset=100, data=b""),
        part(header=a_put(), index=1, offset=100, data=b"x"),
    ]
    for message in bad:
        with pytest.raises(InvalidRequest):
            check_part(message, order, [0, 100, 0])
    large = a_put()
    large.page_bytes = 4 << 20
    with pytest.raises(InvalidRequest, match="at most"):
        check_part(part(index=0, data=bytes((1 << 20) + 4)), PUT.decode(large), [0, 0, 0])


def test_pages_that_the_arena_cannot_hold_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="memory-bytes"):
        PageArena(  # type: ignore[call-arg]
            settings=None,  # type: ignore[arg-type]
            name="",
            epoch=1,
            arena=np.zeros(4096, np.uint8),
            page_bytes=2048,
            transport=None,  # type: ignore[arg-type]
            counters=None,  # type: ignore[arg-type]
            threads=None,  # type: ignore[arg-type]
            reply=print,
            wake=print,
        )
