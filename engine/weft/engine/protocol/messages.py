"""Messages between an engine and the server process in front of it.

Plain dataclasses: the engine knows no wire format, the server encodes them (msgpack) for the local
socket and converts them to protobuf at its edge. One `Inbox` and one `Outbox` travel per turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from weft.engine.base.faults import FaultSpec, FaultState
from weft.engine.base.request import PromptLogprobs, SamplingParams, StopCriteria, TokenLogprob
from weft.engine.memory.events import KvChange
from weft.engine.protocol.handle import FillEvent, KvHandle, NixlTargetInfo
from weft.engine.scheduler.state import FillCandidate, Timeline
from weft.engine.transfer.staging import StagingCounts

# -- to the engine ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class SampleProgress:
    """Progress of one sample of a resumed request."""

    sample: int
    tokens: list[int]
    """Generated so far, on other owners."""
    is_finished: bool = False
    """Whether the sample is complete: it is not run again, and nothing is reported of it."""


@dataclass(slots=True, kw_only=True)
class Submit:
    """A request for this owner; its key is (session, request_id, attempt)."""

    session: int
    request_id: str
    attempt: int
    prompt: list[int]
    sampling: SamplingParams
    stop: StopCriteria
    top_logprobs: int | None = None
    """Number of alternatives per token; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens."""
    candidates: list[FillCandidate] = field(default_factory=list)
    first_token_timeout_s: float = 600.0
    total_timeout_s: float = 600.0
    cache_salt: str = ""
    traceparent: str = ""
    priority: int = 0
    """Priority; a lower number is more urgent."""
    tenant: str = ""
    """Tenant that is charged, where tenants are treated fairly; empty: one shared tenant."""
    adapter: bytes = b""
    """Content digest (32 bytes) of the adapter that it is to be run with; empty: the base model."""
    session_id: str = ""
    """Chat session whose KV is to be kept; empty: none."""
    ends_session: bool = False
    """Whether this is the last request of the session."""
    progress: list[SampleProgress] = field(default_factory=list)
    """Progress in earlier attempts; samples without an entry start afresh."""


@dataclass(slots=True, kw_only=True)
class Cancel:
    """Ends a request or one of its samples."""

    session: int
    request_id: str
    attempt: int
    sample: int | None = None


@dataclass(slots=True, kw_only=True)
class SessionEnd:
    """A chat session is over: nothing is kept for it any more."""

    cache_salt: str
    session_id: str


@dataclass(slots=True, kw_only=True)
class FillStart:
    """An owner asks this engine to fill; events go back on `stream`."""

    stream: int
    handle: KvHandle
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class LeaseQuery:
    """Asks a filler what became of a lease, and stops it."""

    query: int
    lease_id: bytes


@dataclass(slots=True, kw_only=True)
class FillerEvent:
    """An event from a filler about one of our leases, or the loss of its stream."""

    lease_id: bytes
    event: FillEvent


@dataclass(slots=True, kw_only=True)
class LeaseAnswer:
    """Answer of a filler to our query about a lease; `filler_epoch` is who answered."""

    lease_id: bytes
    worker_id: str
    filler_epoch: int
    state: str
    """unknown, active, stopping, stopped or fence_needed."""


@dataclass(slots=True, kw_only=True)
class ProcessExited:
    """Proof that an incarnation of a worker is gone."""

    worker_id: str
    epoch: int
    query: int


@dataclass(slots=True, kw_only=True)
class StoreSegment:
    """Consecutive pages of a prompt that one replica of the store holds."""

    num_pages: int
    store_id: str
    address: str
    epoch: int


@dataclass(slots=True, kw_only=True)
class StoreAnswer:
    """The store's answer to a lookup; nothing when it could not be asked."""

    lookup: int
    segments: list[StoreSegment] = field(default_factory=list)
    """What is held, from the prompt's first page on."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Incarnations of the replicas that answered, by their addresses."""


@dataclass(slots=True, kw_only=True)
class StorePutResult:
    """Result of a put."""

    put: int
    is_answered: bool
    stored_pages: int = 0
    wants_data: bool = False
    """The store cannot read the pool: it asks for the pages' bytes."""


@dataclass(slots=True, kw_only=True)
class AdapterOrder:
    """Loads or unloads an adapter; answered by one `AdapterReply` in any case.

    A load is answered once the adapter is read, checked and known to fit, or has failed; that of
    one which is there already at once (it changes its name, directory and pin). An unload is
    answered once no request uses the adapter; new ones are refused from the order on. A load that
    comes before that ends the unload, which is answered then. Nothing is known of the digest:
    an unload is answered at once.
    """

    query: int
    action: Literal["load", "unload"]
    digest: bytes
    """Content digest, 32 bytes; what is read must have it."""
    name: str = ""
    """Name for people; the engine does not tell adapters apart by it."""
    directory: str = ""
    """Directory of the adapter, unchanged until it is unloaded: it may be read again."""
    is_pinned: bool = False
    """Whether the adapter stays on the device."""
    is_lenient: bool = False
    """For a load: whether to leave out what the model or this worker cannot apply (the digest
    tells).
    """


@dataclass(slots=True, kw_only=True)
class FaultOrder:
    """Arms a fault in the engine's process or disarms some; answered by those armed then."""

    query: int
    add: FaultSpec | None = None
    clear: str | None = None
    """Disarms what is armed at this point; empty = everything."""


@dataclass(slots=True, kw_only=True)
class Ping:
    """Asks whether the loop is alive and whether it has these requests."""

    session: int
    nonce: int
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Requests asked about: (request id, attempt)."""
    expects_constraints: bool = False
    """Constrained requests may come."""


@dataclass(slots=True, kw_only=True)
class Inbox:
    """All messages received since the last turn; handled kind by kind in this order."""

    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    session_ends: list[SessionEnd] = field(default_factory=list)
    closed_gateways: list[int] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)
    fill_starts: list[FillStart] = field(default_factory=list)
    fill_renewals: list[bytes] = field(default_factory=list)
    fill_stops: list[bytes] = field(default_factory=list)
    taken_fill_events: list[tuple[int, int]] = field(default_factory=list)
    """(stream, its events so far that are with gRPC), of streams that carry data."""
    broken_fill_streams: list[int] = field(default_factory=list)
    lease_queries: list[LeaseQuery] = field(default_factory=list)
    filler_events: list[FillerEvent] = field(default_factory=list)
    lease_answers: list[LeaseAnswer] = field(default_factory=list)
    exits: list[ProcessExited] = field(default_factory=list)
    store_answers: list[StoreAnswer] = field(default_factory=list)
    store_put_results: list[StorePutResult] = field(default_factory=list)
    drain: bool = False
    """Takes no new work; requests that wait are handed back, those that run go on."""
    hand_back: bool = False
    """Hands back what still runs: its owners can resume it elsewhere."""
    flush_cache: list[int] = field(default_factory=list)
    """Query ids of flush orders."""
    dump_state: list[tuple[int, int]] = field(default_factory=list)
    """(query, entries of each list at most)."""
    adapter_orders: list[AdapterOrder] = field(default_factory=list)
    """Handled before everything else: what comes with them may name the adapters."""
    fault_orders: list[FaultOrder] = field(default_factory=list)
    """Orders for the fault points of the engine's process."""
    log_level: str = ""
    """New log level of the engine's process: debug, info, warning or error; empty: unchanged."""


# -- from the engine -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Failure:
    """A `WeftError` as plain data."""

    reason: str
    message: str
    stage: str = ""
    param: str | None = None
    retry_after_s: float | None = None


@dataclass(slots=True, kw_only=True)
class Accepted:
    """Confirms that the request is queued."""

    request_id: str
    attempt: int


class Tokens(NamedTuple):
    """New tokens of one sample."""

    request_id: str
    attempt: int
    sample: int
    first_index: int
    """Index of the first of these among the generated tokens."""
    ids: list[int]
    logprobs: list[TokenLogprob]
    """Log-probabilities, one for each of `ids`, or none."""


class TokenColumns(NamedTuple):
    """One new token each of many samples: what `Tokens` says of one."""

    request_ids: list[str]
    attempts: list[int]
    samples: list[int]
    indices: list[int]
    """Numbers of the tokens among the generated ones."""
    ids: list[int]
    logprobs: dict[int, TokenLogprob]
    """Log-probabilities by row, of the samples that want them."""

    def of_rows(self, rows: Sequence[int]) -> TokenColumns:
        """Returns the columns of some of the samples."""
        return TokenColumns(
            [self.request_ids[row] for row in rows],
            [self.attempts[row] for row in rows],
            [self.samples[row] for row in rows],
            [self.indices[row] for row in rows],
            [self.ids[row] for row in rows],
            {at: self.logprobs[row] for at, row in enumerate(rows) if row in self.logprobs},
        )

    def rows(self) -> Iterator[tuple[str, int, int, int, int]]:
        """Yields request id, attempt, sample, index and token of each sample."""
        return zip(
            self.request_ids, self.attempts, self.samples, self.indices, self.ids, strict=True
        )

    def entries(self) -> Iterator[Tokens]:
        """Yields the same one by one."""
        for row, (request_id, attempt, sample, index, token) in enumerate(self.rows()):
            logprobs = [self.logprobs[row]] if row in self.logprobs else []
            yield Tokens(request_id, attempt, sample, index, [token], logprobs)


@dataclass(slots=True, kw_only=True)
class Preempted:
    """A running sample was put back into the queue."""

    request_id: str
    attempt: int
    sample: int


@dataclass(slots=True, kw_only=True)
class Finished:
    """Reports that one sample ended without an error."""

    request_id: str
    attempt: int
    sample: int
    reason: str
    """Reason: stop, length or cancelled."""
    stop_token_id: int | None
    completion_tokens: int
    cached_prompt_tokens: int
    timeline: Timeline


@dataclass(slots=True, kw_only=True)
class Failed:
    """A whole request was refused or broke."""

    request_id: str
    attempt: int
    failure: Failure
    timeline: Timeline | None = None
    """Timeline of the request's first sample, if it was queued."""


@dataclass(slots=True, kw_only=True)
class Pong:
    """Answer to a ping."""

    nonce: int
    unknown: list[tuple[str, int]] = field(default_factory=list)
    """Those of the requests asked about that the engine does not have."""


@dataclass(slots=True, kw_only=True)
class GatewayBatch:
    """Everything that one step produced for one session."""

    session: int
    accepted: list[Accepted] = field(default_factory=list)
    tokens: list[Tokens] = field(default_factory=list)
    """Tokens of drafts, and repeated ones; of a sample also in `columns`, these come first."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    columns: list[TokenColumns] = field(default_factory=list)
    preempted: list[Preempted] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    pongs: list[Pong] = field(default_factory=list)

    def all_tokens(self) -> Iterator[Tokens]:
        """Yields `tokens`, then the tokens of `columns`."""
        yield from self.tokens
        for columns in self.columns:
            yield from columns.entries()


@dataclass(slots=True, kw_only=True)
class FillCommand:
    """A message that the server sends to a filler: start (with handle), renew, stop or query."""

    lease_id: bytes
    worker_id: str
    address: str
    kind: str
    """Kind of filler: prefill or kvstore."""
    action: str
    """start, renew, stop, query or report."""
    handle: KvHandle | None = None
    corrupt: tuple[bytes, int] | None = None
    """With `report`: key of a page, and the digest that the store announced for it."""
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class StoreLookup:
    """Asks how many leading pages the store holds."""

    lookup: int
    namespace: bytes
    keys: list[bytes]
    request_id: str = ""
    traceparent: str = ""


@dataclass(slots=True, kw_only=True)
class StorePut:
    """Offers pages to the store; answered by StorePutResult in any case."""

    put: int
    namespace: bytes
    keys: list[bytes]
    parents: list[bytes]
    """Keys of the pages before them in their prompts; empty: none."""
    shards: list[bytes]
    """Shard key of each page, which determines its replica (`weft.engine.base.shards`)."""
    digests: list[int]
    pages: list[int]
    source: NixlTargetInfo | None
    """Where the store reads the pages; None: their bytes are in `data`."""
    data: list[bytes]


@dataclass(slots=True, kw_only=True)
class FillReply:
    """A filler's event for the owner on `stream`."""

    stream: int
    event: FillEvent


@dataclass(slots=True, kw_only=True)
class LeaseReply:
    """Answer to a LeaseQuery; `state` as in LeaseAnswer."""

    query: int
    state: str


@dataclass(slots=True, kw_only=True)
class AdapterReply:
    """Result of an AdapterOrder."""

    query: int
    failure: Failure | None = None
    """The failure; None: the order succeeded."""


AdapterPlace = Literal["loading", "disk", "host", "device", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """State of one adapter from the order to load it until the order to unload it."""

    digest: bytes
    name: str
    state: AdapterPlace
    """Requests may name it on `disk` (it was read, its memory was needed), `host` and `device`, not
    while it is `loading` for the first time, nor if it `failed` to."""
    rank: int = 0
    """The largest; 0 while it is not known."""
    num_bytes: int = 0
    """Bytes of its weights in memory; 0 while unknown."""
    num_requests: int = 0
    """Requests that name it and have not ended."""
    is_pinned: bool = False
    is_unloading: bool = False
    """New requests may not name it; it goes with the last that does."""
    error: str = ""
    """Error message of the state `failed`."""
    left_out: tuple[str, ...] = ()
    """Some of the tensors that a lenient read left out."""


@dataclass(slots=True, kw_only=True)
class TierReport:
    """State of one tier below the pool."""

    name: str
    """host, disk, or store: the KV store, whose pages are not counted here."""
    total_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    """Pages that can be read, and pages reserved for loads in progress."""
    load_bytes_per_s: float
    """Measured load bandwidth, bytes per second; 0: unknown."""
    counters: dict[str, int]
    """Counters since start (`weft.engine.sources.tiers.tier.TierCounters`)."""


@dataclass(slots=True, kw_only=True)
class LoadReport:
    """The engine's state, sent every 100 ms and after changes of note."""

    running_requests: int
    waiting_requests: int
    filling_requests: int
    queued_tokens: int
    """Prompt tokens to be computed, without what the prefix cache has of those that wait."""
    request_tokens: int
    """Prompt and generated tokens of all requests."""
    total_pages: int
    free_pages: int
    cached_pages: int
    used_pages: int
    quarantined_pages: int
    quarantine_over_s: float
    """Seconds for which quarantined pages, or staging pages, are above `max_quarantine_fraction`.
    """
    staging: StagingCounts | None = None
    """Staging pages of a pool that peers cannot reach directly; None: they can."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    decode_step_s: float
    """Mean time of the latest steps in which requests decoded; 0: none did yet."""
    decode_step_requests: float
    """Mean requests that decoded in those."""
    new_token_ratio: float
    """Share of their `max_tokens` that requests are expected to generate, for admission."""
    stale_after_s: float
    is_draining: bool
    is_idle: bool
    """Whether there is no request, lease or put, so that the engine's end would go unnoticed."""
    transport_detail: str
    """Transports and lanes now (lanes are known once pages travelled)."""
    counters: dict[str, int]
    tiers: list[TierReport] = field(default_factory=list)
    adapters: list[AdapterState] = field(default_factory=list)
    """Adapters whose state has changed since the last report: there may be thousands."""
    gone_adapters: list[bytes] = field(default_factory=list)
    """Digests of those that are no more since then."""
    sessions: int = 0
    """Chat sessions with pinned pages."""
    pinned_pages: int = 0
    """Number of pages pinned for them, cached or used."""
    draft_depths: dict[int, int] = field(default_factory=dict)
    """Drafts that each request brings to a step, by the number of requests in it from which on
    that holds; none where nothing is drafted."""


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Everything that one turn of the engine's loop produced."""

    sessions: list[GatewayBatch] = field(default_factory=list)
    fill_commands: list[FillCommand] = field(default_factory=list)
    fill_replies: list[FillReply] = field(default_factory=list)
    lease_replies: list[LeaseReply] = field(default_factory=list)
    store_lookups: list[StoreLookup] = field(default_factory=list)
    store_puts: list[StorePut] = field(default_factory=list)
    exit_replies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (query, pages released)."""
    kv_changes: list[KvChange] = field(default_factory=list)
    """Changes of the prefix cache."""
    flush_replies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (query, pages flushed)."""
    state_replies: list[tuple[int, str]] = field(default_factory=list)
    """Pairs (query, JSON object)."""
    adapter_replies: list[AdapterReply] = field(default_factory=list)
    fault_replies: list[tuple[int, list[FaultState]]] = field(default_factory=list)
    """(query, faults armed in the engine's process)."""
    load: LoadReport | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine reports once, when it is ready."""

    epoch: int
    model_digest: bytes
    dtype: str
    vocab_size: int
    max_context_tokens: int
    num_pages: int
    page_size: int
    page_bytes: int
    layers: int
    kv_heads: int
    head_dim: int
    transports: list[str]
    transport_detail: str
    versions: dict[str, str]
    notices: list[str]
    engine_pid: int
    draft: str = ""
    """Hexadecimal digest of the draft head whose KV is the last layer; empty: there is none."""
    max_loras: int = 0
    """Adapters on the device at once; 0: it serves none."""
    max_lora_rank: int = 0
