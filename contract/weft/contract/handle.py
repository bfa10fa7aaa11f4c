"""The fill contract as plain values: handle in, events out (protos/weft/v1/kv.proto)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.contract.request import MAX_PRIORITY, MAX_TENANT_BYTES
from weft.contract.spans import MAX_SPANS, MediaSpan
from weft.contract.token_ids import TokenIds
from weft.contract.wire import wire

DATA_CHUNK_BYTES = 1 << 20
"""Most bytes in one `data` event."""
LEASE_ID_BYTES = 16
SHARE_SECRET_BYTES = 16
ADAPTER_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlTargetInfo:
    """Data that a filler needs to write into an owner's pool over NIXL."""

    version: str
    agent_name: str
    agent_metadata: bytes
    agent_metadata_digest: bytes
    """BLAKE2b-256 of agent_metadata."""
    base_address: int
    page_bytes: int
    num_pages: int
    device_id: int = 0
    memory_type: str = "DRAM"
    max_notified_digests: int = 0
    """Most digests of a chunk that its notification may carry; 0: the owner reads none there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTargetInfo:
    """Data that a filler on the owner's host needs to map the owner's pool."""

    socket: str = field(metadata=wire(least=1, most=64))
    """Name of the abstract Unix socket at which the owner hands out its memory."""
    secret: bytes = field(
        repr=False, metadata=wire(least=SHARE_SECRET_BYTES, most=SHARE_SECRET_BYTES)
    )
    page_bytes: int
    num_pages: int
    memory_type: str = "DRAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvHandle:
    """Describes the pages of an owner's pool to fill, and the tokens whose KV they are to hold."""

    owner_id: str
    owner_epoch: int
    lease_id: bytes = field(metadata=wire(least=LEASE_ID_BYTES, most=LEASE_ID_BYTES))
    lease_s: float = field(metadata=wire(name="lease_duration"))
    namespace: bytes
    cache_salt: str
    page_size: int
    tokens: TokenIds
    """Tokens at positions [0, end_token)."""
    start_token: int
    end_token: int
    pages: list[int]
    """Destinations, from page start_token / page_size on. `companion_pages` more pages follow, for
    the data that the request needs in addition to pages of KV to continue: a block of states, or
    pages of the window group end to end, the last one first.
    """
    filler_epoch: int
    nixl: NixlTargetInfo | None = None
    shared: SharedTargetInfo | None = None
    """What the owner offers besides `data` events: at most one of the two."""
    priority: int = field(default=0, metadata=wire(low=-MAX_PRIORITY, high=MAX_PRIORITY))
    """Priority of the request; a lower number is more urgent."""
    tenant: str = field(default="", metadata=wire(most=MAX_TENANT_BYTES))
    """Tenant that is charged for the request."""
    adapter: bytes = field(
        default=b"",
        metadata=wire(name="adapter.digest", least=ADAPTER_DIGEST_BYTES, most=ADAPTER_DIGEST_BYTES),
    )
    """Content digest (`ADAPTER_DIGEST_BYTES`) of the adapter with which the pages are computed;
    empty: the base model. It is also part of `namespace`, from which the filler could not read it.
    """

    block_pages: int = 0
    """Asks a KV store for blocks of so many pages each after those of the tokens; see
    `weft.contract.keys.blocks_keys`. 0: for one block, or the handle goes to a worker.
    """
    state_pages: int = 0
    """Asks a KV store for so many pages before those blocks (`PieceShape.state_pages`)."""
    spans: list[MediaSpan] = field(default_factory=list, metadata=wire(most=MAX_SPANS))
    """Media among the tokens, in order."""
    tail_spans: list[MediaSpan] = field(default_factory=list, metadata=wire(most=MAX_SPANS))
    """Media from the last of the tokens on, whose rows the owner asks for: it has no encoder, and
    computes these tokens itself. The rows follow all else in `pages`, end to end.
    """
    encoder_digest: bytes = b""
    """With media: the owner's encoder of them, which keys name."""

    @property
    def companion_pages(self) -> int:
        """Number of pages after those of the tokens."""
        return len(self.pages) - (self.end_token - self.start_token) // self.page_size


EventKind = Literal[
    "accepted", "declined", "written", "data", "stopped", "done", "failed", "broken"
]


LAST_EVENTS = frozenset({"declined", "stopped", "done", "failed"})
"""Kinds of events that end a fill; a stream that ends counts as `broken`."""


@dataclass(slots=True, kw_only=True)
class FillTimings:
    """Durations measured by the filler since it accepted the fill."""

    accepted_at: float = 0.0
    """Time of the acceptance on the filler's monotonic clock; meaningless on other machines."""
    queued_s: float = 0.0
    planned_s: float = 0.0
    """When the first step with its tokens was planned; 0: nothing was computed."""
    first_write_posted_s: float = 0.0
    last_chunk_computed_s: float = 0.0
    last_digested_s: float = 0.0
    """When the last chunk had been copied to where peers read it, and digested."""
    last_digest_s: float = 0.0
    """Duration of the digesting alone, part of the time before that."""
    last_write_posted_s: float = 0.0
    """When the post of the last chunk's write returned; over some lanes a post moves the bytes."""
    last_write_complete_s: float = 0.0
    reported_s: float = 0.0
    """When the engine noticed that the last write was done, and sent `done`."""
    computed_tokens: int = 0
    bytes: int = 0


@dataclass(slots=True, kw_only=True)
class FillEvent:
    """One event of a fill; which fields are set depends on `kind`.

    accepted: filler_epoch, transport, cached_tokens. declined: reason, message. written: chunk,
    start_token, end_token, digests, and with the last one computed_tokens. data: chunk, start_token
    (of the page), offset, data. done: timings. failed: message, is_stopped, needs_fence. broken
    (the stream ended without a last event).
    """

    kind: EventKind
    filler_epoch: int = 0
    transport: str = ""
    cached_tokens: int = 0
    reason: str = ""
    message: str = ""
    chunk: int = 0
    start_token: int = 0
    end_token: int = 0
    digests: list[int] = field(default_factory=list)
    computed_tokens: int | None = None
    """Prompt tokens that the filler computed, sent with the last chunk; None: not known yet."""
    offset: int = 0
    data: bytes = b""
    num_held: int = 0
    """Bytes of data that are not in `data` but in memory which a worker's two processes share: on
    the way out at `held_at`, on the way in where they belong. Peers are not told.
    """
    held_at: int = 0
    is_stopped: bool = False
    needs_fence: bool = field(default=False, metadata=wire(name="fence_needed"))
    """Whether writes that the filler's network took can still arrive until the owner closes its end
    of the connection.
    """
    timings: FillTimings | None = None
