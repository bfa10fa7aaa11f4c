"""Lookups and puts of pages in the KV store."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.handle import NixlTargetInfo

MAX_STORED_BLOCK_PAGES = 1024
"""Most pages of a block of recurrent layers, or of one page of a window group, in a store."""


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
    """Result of a put."""

    put: int
    is_answered: bool
    stored_pages: int = 0
    wants_data: bool = False
    """Whether the store cannot read the pool and asks for the pages' bytes instead."""


@dataclass(slots=True, kw_only=True)
class StoreLookup:
    """Asks how many leading pages the store holds."""

    lookup: int
    namespace: bytes
    keys: list[bytes]
    block_pages: int = 0
    """Pages of a block of recurrent layers or of a window page. Pages count up to the last one
    where a request can go on, and all of a prompt are on the replica of its first page. 0: the
    model has no blocks.
    """
    window_pages: int = 0
    """Number of last pages whose blocks a request needs to go on; 0: of one."""
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
