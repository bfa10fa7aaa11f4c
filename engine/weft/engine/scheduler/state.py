"""A request as the scheduler sees it: its tokens, pages, counters and legal states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from weft.engine.errors import WeftError
from weft.engine.memory.keys import PageKeys
from weft.engine.memory.radix_cache import Node
from weft.engine.request import SamplingParams, StopCriteria
from weft.engine.scheduler.acceptance import Acceptance


class State(Enum):
    """Where a request is. Only `Scheduler` changes it, along `LEGAL_EDGES`."""

    WAITING = "waiting"
    """Queued. May hold pages that are already right (a fork, an accepted part of a fill)."""
    LOADING = "loading"
    """A KV store copies its pages. Never a victim of pre-emption."""
    FILLING = "filling"
    """Somebody else writes its pages. Never a victim of pre-emption."""
    PREFILLING = "prefilling"
    """Its prompt is computed here, chunk by chunk."""
    RUNNING = "running"
    """One new token a step."""
    PREEMPTED = "preempted"
    """Was running, gave its pages back, queued again."""
    FINISHED = "finished"


LEGAL_EDGES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.LOADING, State.FILLING, State.PREFILLING, State.FINISHED}),
    State.LOADING: frozenset({State.FILLING, State.PREFILLING, State.WAITING, State.FINISHED}),
    State.FILLING: frozenset({State.LOADING, State.PREFILLING, State.WAITING, State.FINISHED}),
    State.PREFILLING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.LOADING, State.PREFILLING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FillCandidate:
    """Who may fill a request: a prefill worker as the router saw it, or a KV store."""

    worker_id: str
    address: str
    epoch: int
    first_token: int = 0
    """Of a KV store: where what it holds begins."""
    match_tokens: int = 0
    """Leading tokens that it holds; of a KV store: where what it holds ends."""
    queued_tokens: int = 0
    tokens_per_second: float = 0.0
    kind: str = "prefill"
    """prefill or kvstore."""


@dataclass(slots=True, kw_only=True)
class FillRecord:
    """One fill of a request, for its timeline. Times are seconds since the submit."""

    source: str
    """prefill or kvstore."""
    worker_id: str
    transport: str
    start_token: int
    end_token: int
    start_s: float
    end_s: float = 0.0
    accepted_tokens: int = 0
    computed_tokens: int = 0
    bytes: int = 0
    first_write_posted_s: float = 0.0
    last_chunk_computed_s: float = 0.0
    last_write_complete_s: float = 0.0
    failure: str = ""
    filler_failed: bool = False
    """By the filler's fault: not declined, nor stopped by this owner."""
    lease_id: str = ""
    """Names the fill, in hexadecimal; empty when nobody was asked."""

    @classmethod
    def not_asked(
        cls, candidate: FillCandidate, at_token: int, at_s: float, why: str
    ) -> FillRecord:
        """A candidate that was passed over."""
        return cls(
            source=candidate.kind,
            worker_id=candidate.worker_id,
            transport="",
            start_token=at_token,
            end_token=at_token,
            start_s=at_s,
            end_s=at_s,
            failure=f"not asked: {why}",
        )


@dataclass(slots=True, kw_only=True)
class Timeline:
    """What happened to a request. Times are seconds since the submit."""

    submitted_at: float
    """On the engine's clock."""
    admitted_s: float | None = None
    matched_tokens: int = 0
    local_prefill_tokens: int = 0
    fills: list[FillRecord] = field(default_factory=list)
    first_token_s: float | None = None
    finish_s: float | None = None
    num_steps: int = 0
    num_drafted_tokens: int = 0
    """Drafts that were verified."""
    num_accepted_tokens: int = 0
    """Of these, those that were what the model drew."""
    num_tree_steps: int = 0
    """Steps in which its drafts formed a tree."""
    num_preemptions: int = 0
    remote_cost_s: float | None = None
    local_cost_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a submit: a session of a gateway, its request id and attempt."""

    session: int
    request_id: str
    attempt: int


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sample of one submit, or one fill job of a prefill worker (`is_fill`).

    Tokens [0, num_computed) have their KV in `pages`, the next `num_launched` get it by steps under
    way; page i holds positions [i * page_size, (i + 1) * page_size). `RequestPages` changes what
    says so.
    """

    key: RequestKey
    sample: int
    tokens: list[int]
    """Prompt and generated tokens. What a step under way draws is not among them yet."""
    num_prompt_tokens: int
    params: SamplingParams
    stop: StopCriteria
    max_tokens: int
    """Generated tokens at most; fits the context."""
    eos_token_ids: frozenset[int]
    seed: int
    """Of this sample."""
    top_logprobs: int | None
    keys: PageKeys
    arrival: int
    """Order of submission over the engine's life."""
    first_token_deadline: float
    deadline: float
    timeline: Timeline
    is_fill: bool = False
    lease_id: bytes = b""
    """Of a fill job."""
    digests: Sequence[int] | None = None
    """A fill job's pages are digested when they are shipped."""
    candidates: list[FillCandidate] = field(default_factory=list)
    """Who is still to be tried, best first."""
    lookup_until: float = 0.0
    """Time until which an answer of the KV store is waited for; 0 = none is."""
    cache_salt: str = ""
    namespace: bytes = b""
    adapter: bytes = b""
    """Content digest of its adapter; empty: the base model."""
    priority: int = 0
    """Less is more urgent."""
    tenant: str = ""
    """Who is charged, where tenants are treated fairly."""
    num_charged_tokens: int = 0
    """Generated tokens that the tenant was charged for."""
    leader: Request | None = None
    """Computes or is sent pages that this request, which waits, wants to share."""
    leader_pages: int = 0
    """The leader's published pages when it was looked at."""
    has_had_leader: bool = False
    session_id: str = ""
    """Of the chat that it belongs to; empty: none."""
    ends_session: bool = False
    """It is the last one of its session, which keeps nothing then."""
    traceparent: str = ""
    num_store_pages: int | None = None
    """Leading pages of the prompt that the KV store said it holds; None: it did not say."""
    state: State = State.WAITING
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_launched: int = 0
    """Of steps that have begun and are not committed; steps may still read and write its pages, or
    those that it had, while this is not 0."""
    decodes_from: int = 0
    """Position from which on it brings one token a step, since it runs."""
    speculates: bool = False
    """Drafts of its tokens may be verified."""
    num_verifying: int = 0
    """Steps under way that verify drafts of it: how far they come, only the device knows."""
    acceptance: Acceptance | None = None
    """What is known of drafts for it."""
    is_draft_behind: bool = False
    """A draft model has not read all of its tokens yet: that it made no drafts says nothing."""
    lacks_draft_room: bool = False
    """A draft model has no pages for it, or no positions: drafts of others are not judged by it."""
    state_end: int = 0
    """With a draft model: the slot holds the model's state of the token before this position."""
    num_published_pages: int = 0
    num_promised_pages: int = 0
    cache_leaf: Node | None = None
    """Where its published pages end in the prefix cache, if that is known."""
    partial_page: int | None = None
    """Cached page that begins as the request goes on after `pages`, while admission looks at it."""
    num_partial_tokens: int = 0
    """Tokens of it that fit."""
    num_found_tokens: int = 0
    """Tokens that the prefix cache had of it when it was last looked at, while it waits."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found, not computed, for this request."""
    slot: int = -1
    adapter_slot: int = 0
    """Place of its adapter in the device's tables, while it has a `slot`; 0: no adapter."""
    unforked_samples: dict[int, list[int]] = field(default_factory=dict)
    """Siblings to be forked once the prompt's KV exists (first sample only), and the tokens that
    each has generated elsewhere."""
    error: WeftError | None = None
    end_token_ids: frozenset[int] = field(init=False)
    """Tokens that may end the sample."""

    def __post_init__(self) -> None:
        self.end_token_ids = self.eos_token_ids.union(self.stop.stop_token_ids)

    @property
    def draws_in_turn(self) -> bool:
        """What is drawn depends on the tokens just before it: one after another."""
        params = self.params
        return params.has_penalties or params.constraint is not None or self.stop.min_tokens > 0

    @property
    def starts_late(self) -> bool:
        """Where the step that began last starts depends on one that is under way."""
        return self.num_verifying > 1

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Generated tokens."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def awaits_first_token(self) -> bool:
        """Nothing was drawn for it here yet; a resumed request may have tokens all the same."""
        return self.timeline.first_token_s is None

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be made, by steps that have not begun."""
        return len(self.tokens) - self.num_computed - self.num_launched

    @property
    def num_to_compute(self) -> int:
        """`num_pending`, without what was in the prefix cache when it was last looked at."""
        return self.num_pending - (0 if self.pages else self.num_found_tokens)
