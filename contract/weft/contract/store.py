"""Lookups and puts of pages in the KV store."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.handle import NixlTargetInfo
from weft.contract.wire import wire

KEY_BYTES = 32
WORD_BYTES = 8
"""Pages have a whole number of words of this size, of which their digests are made."""
MAX_STORED_BLOCK_PAGES = 1024
"""Most pages of a block of recurrent layers, or of one page of a window group, in a store."""
MAX_LOOKUP_KEYS = 65_536
MAX_PUT_PAGES = 1024
_MAX_SOURCE_ID_BYTES = 256


def _check_parent(key: bytes) -> None:
    if key and len(key) != KEY_BYTES:
        raise ValueError(f"has {len(key)} bytes, not {KEY_BYTES}")


def _check_page_bytes(size: int) -> None:
    if size == 0 or size % WORD_BYTES:
        raise ValueError(f"= {size}: it must be a multiple of {WORD_BYTES}")


def _check_offers(offers: list[Offer]) -> None:
    if len({offer.key for offer in offers}) < len(offers):
        raise ValueError("have a key that comes twice")


@dataclass(slots=True, kw_only=True)
class StoreSegment:
    """Consecutive pages of a prompt that one replica of the store holds."""

    num_pages: int
    store_id: str
    address: str
    epoch: int


@dataclass(slots=True, kw_only=True)
class StoreAnswer:
    """The store's answer to a lookup; empty if the store could not be asked."""

    lookup: int
    segments: list[StoreSegment] = field(default_factory=list)
    """The held pages, from the prompt's first page on."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Incarnations of the replicas that answered, by their addresses."""


@dataclass(slots=True, kw_only=True)
class StorePutResult:
    put: int
    is_answered: bool
    stored_pages: int = 0
    wants_data: bool = False
    """Whether the store cannot read the pool and asks for the pages' bytes instead."""


@dataclass(slots=True, kw_only=True)
class StoreLookup:
    """Asks how many leading pages the store holds."""

    lookup: int
    namespace: bytes = field(metadata=wire(least=KEY_BYTES, most=KEY_BYTES))
    keys: list[bytes] = field(metadata=wire(most=MAX_LOOKUP_KEYS, entry_bytes=KEY_BYTES))
    block_pages: int = field(default=0, metadata=wire(low=0, high=MAX_STORED_BLOCK_PAGES))
    """Pages of a block of recurrent layers or of a window page. Pages count up to the last one
    after which a request can continue, and all pages of a prompt are on the replica of its first
    page. 0: the model has no blocks.
    """
    window_pages: int = field(default=0, metadata=wire(low=0, high=MAX_LOOKUP_KEYS))
    """Number of last pages whose blocks a request needs to continue; 0: it needs one block."""
    state_pages: int = field(default=0, metadata=wire(low=0, high=MAX_STORED_BLOCK_PAGES))
    """Pages beside the last page alone that a request needs in addition: a block of recurrent
    layers, if `block_pages` are of a window page.
    """
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class StorePut:
    """Offers pages to the store; answered by StorePutResult in any case."""

    put: int
    namespace: bytes
    keys: list[bytes]
    parents: list[bytes]
    """For each page the key of the page before it in its prompt; empty: it is the first."""
    shards: list[bytes]
    """Shard key of each page, which determines its replica (`weft.engine.base.shards`)."""
    digests: list[int]
    pages: list[int]
    source: NixlTargetInfo | None
    """Where the store reads the pages; None: their bytes are in `data`."""
    data: list[bytes]


@dataclass(slots=True, kw_only=True)
class StoreHold:
    """Asks a replica to keep pages still while this worker reads them; answered by StoreHeld."""

    hold: int
    address: str
    """Of the replica."""
    keys: list[bytes] = field(metadata=wire(most=MAX_LOOKUP_KEYS, entry_bytes=KEY_BYTES))


@dataclass(slots=True, kw_only=True)
class StoreHeld:
    """The leading pages of those asked for that a replica keeps still until the hold is released,
    and where they lie in its memory. Without pages it keeps none.
    """

    hold: int
    arena_address: int = 0
    page_bytes: int = 0
    pages: list[int] = field(default_factory=list, metadata=wire(most=MAX_LOOKUP_KEYS))
    """Numbers of the pages, which lie one after another from `arena_address` on."""
    digests: list[int] = field(default_factory=list, metadata=wire(most=MAX_LOOKUP_KEYS))
    nixl_version: str = ""
    agent_name: str = ""
    agent_metadata: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class Offer:
    """One page that a worker offers to one replica of the store."""

    key: bytes = field(metadata=wire(least=KEY_BYTES, most=KEY_BYTES, param="pages"))
    digest: int
    source_page: int = field(metadata=wire(name="page"))
    """Page number in the worker's pool."""
    parent: bytes = field(default=b"", metadata=wire(name="parent_key", check=_check_parent))
    """Key of the page before it in its prompt; empty: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PutOrder:
    """The pages that a worker offers to one replica."""

    source_id: str = field(metadata=wire(least=1, most=_MAX_SOURCE_ID_BYTES))
    source_epoch: int
    namespace: bytes = field(metadata=wire(least=KEY_BYTES, most=KEY_BYTES))
    page_bytes: int = field(metadata=wire(check=_check_page_bytes))
    offers: list[Offer] = field(
        metadata=wire(name="pages", least=1, most=MAX_PUT_PAGES, check=_check_offers)
    )
    source: NixlTargetInfo | None
    """Where the pages can be read; None: they come as data."""
