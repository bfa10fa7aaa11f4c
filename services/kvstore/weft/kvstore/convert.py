"""Conversion of requests from protobuf to plain values, validated on arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.common.worker.fills import target_from_proto
from weft.contract.errors import InvalidRequest
from weft.contract.handle import DATA_CHUNK_BYTES, NixlTargetInfo
from weft.contract.store import MAX_STORED_BLOCK_PAGES
from weft.engine.transfer.digest import WORD_BYTES
from weft.kvstore.pages import Offer
from weft.v1 import kvstore_pb2

KEY_BYTES = 32
MAX_LOOKUP_KEYS = 65_536
MAX_PUT_PAGES = 1024
MAX_SOURCE_ID_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder:
    """Pages that a worker offers to the store."""

    source_id: str
    source_epoch: int
    namespace: bytes
    page_bytes: int
    offers: list[Offer]
    source: NixlTargetInfo | None
    """Where the pages can be read; None: they come as data."""


def lookup_keys(request: kvstore_pb2.LookupRequest) -> list[bytes]:
    """Converts the keys of a lookup.

    Raises:
        InvalidRequest: Sizes or numbers are out of bounds.
    """
    _check_namespace(request.namespace)
    keys = list(request.keys)
    if len(keys) > MAX_LOOKUP_KEYS:
        raise InvalidRequest(f"{len(keys)} keys, at most {MAX_LOOKUP_KEYS}", param="keys")
    check_keys(keys, "keys")
    if request.block_pages > MAX_STORED_BLOCK_PAGES:
        raise InvalidRequest(
            f"{request.block_pages} pages a block, at most {MAX_STORED_BLOCK_PAGES}",
            param="block_pages",
        )
    if request.window_pages > MAX_LOOKUP_KEYS:
        raise InvalidRequest(
            f"{request.window_pages} pages with blocks, at most {MAX_LOOKUP_KEYS}",
            param="window_pages",
        )
    return keys


def put_order(message: kvstore_pb2.PutRequest) -> PutOrder:
    """Converts a put.

    Raises:
        InvalidRequest: Sizes or numbers are out of bounds, or a key comes twice.
    """
    _check_namespace(message.namespace)
    if not 0 < len(message.source_id) <= MAX_SOURCE_ID_CHARS:
        raise InvalidRequest(
            f"source_id has {len(message.source_id)} characters", param="source_id"
        )
    size = message.page_bytes
    if size == 0 or size % WORD_BYTES:
        raise InvalidRequest(
            f"page_bytes = {size}: it must be a multiple of {WORD_BYTES}", param="page_bytes"
        )
    if not 0 < len(message.pages) <= MAX_PUT_PAGES:
        raise InvalidRequest(f"{len(message.pages)} pages, 1 to {MAX_PUT_PAGES}", param="pages")
    offers = [Offer(page.key, page.digest, page.page, page.parent_key) for page in message.pages]
    keys = [offer.key for offer in offers]
    check_keys(keys, "pages")
    check_keys([offer.parent for offer in offers if offer.parent], "parent_key")
    if len(set(keys)) != len(keys):
        raise InvalidRequest("a key comes twice", param="pages")
    return PutOrder(
        source_id=message.source_id,
        source_epoch=message.source_epoch,
        namespace=message.namespace,
        page_bytes=size,
        offers=offers,
        source=target_from_proto(message.source) if message.HasField("source") else None,
    )


def check_part(part: kvstore_pb2.PutDataRequest, order: PutOrder, num_bytes: Sequence[int]) -> None:
    """Checks that a part continues its page.

    Args:
        part: The message.
        order: The put's header.
        num_bytes: Bytes received of each page so far.

    Raises:
        InvalidRequest: The part does not continue its page.
    """
    if part.HasField("header"):
        raise InvalidRequest("a second header", param="header")
    if part.index >= len(order.offers):
        raise InvalidRequest(f"index {part.index} of {len(order.offers)} pages", param="index")
    if part.offset != num_bytes[part.index]:
        raise InvalidRequest(
            f"offset {part.offset} of page {part.index} after {num_bytes[part.index]} bytes",
            param="offset",
        )
    end = part.offset + len(part.data)
    if not 0 < len(part.data) <= DATA_CHUNK_BYTES or end > order.page_bytes:
        raise InvalidRequest(
            f"{len(part.data)} bytes at {part.offset} of a page of {order.page_bytes}; at most "
            f"{DATA_CHUNK_BYTES} a message",
            param="data",
        )


def check_keys(keys: Sequence[bytes], param: str) -> None:
    """Checks the sizes of keys.

    Raises:
        InvalidRequest: A key has a wrong size.
    """
    for key in keys:
        if len(key) != KEY_BYTES:
            raise InvalidRequest(f"a key of {len(key)} bytes, not {KEY_BYTES}", param=param)


def _check_namespace(namespace: bytes) -> None:
    if len(namespace) != KEY_BYTES:
        raise InvalidRequest(
            f"namespace has {len(namespace)} bytes, not {KEY_BYTES}", param="namespace"
        )
