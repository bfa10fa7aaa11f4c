"""A request as the scheduler sees it: tokens, pages, counters and legal states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from weft.contract.errors import WeftError
from weft.contract.keys import PageKeys
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.spans import MediaSpan
from weft.contract.tasks import PoolingParams
from weft.contract.timeline import FillCandidate, Timeline
from weft.engine.requests.acceptance import Acceptance
from weft.engine.requests.beam_search import BeamSearch
from weft.engine.requests.incoming import IncomingPages
from weft.engine.requests.media_positions import MediaPositions
from weft.pages.memory.page_memory import PageMemory
from weft.pages.memory.tree import Node


class State(Enum):
    """State of a request. Only `Scheduler` changes it, along `LEGAL_EDGES`."""

    WAITING = "waiting"
    """Queued. May hold pages that are already valid (a fork, an accepted part of a fill)."""
    LOADING = "loading"
    """Pages are being loaded from a tier or KV store. Never a victim of preemption."""
    FILLING = "filling"
    """Pages are being written by another worker. Never a victim of preemption."""
    PREFILLING = "prefilling"
    """The prompt is being computed here, chunk by chunk."""
    RUNNING = "running"
    """Generating, at least one new token per step."""
    PREEMPTED = "preempted"
    """Was running, gave its pages back, and is queued again."""
    FINISHED = "finished"


LEGAL_EDGES: dict[State, frozenset[State]] = {
    # Further texts of a beam search run at once.
    State.WAITING: frozenset(
        {State.LOADING, State.FILLING, State.PREFILLING, State.RUNNING, State.FINISHED}
    ),
    State.LOADING: frozenset({State.FILLING, State.PREFILLING, State.WAITING, State.FINISHED}),
    State.FILLING: frozenset({State.LOADING, State.PREFILLING, State.WAITING, State.FINISHED}),
    State.PREFILLING: frozenset({State.RUNNING, State.WAITING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.LOADING, State.PREFILLING, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a submit: the gateway's stream, request id and attempt."""

    gateway: int
    request_id: str
    attempt: int


class FillTask(NamedTuple):
    """Set on a request that is the filler's side of a fill."""

    lease_id: bytes
    companion_pages: int = 0
    """Pages that the prompt needs here after those of its tokens (`KvHandle.companion_pages`)."""


class ChatSession(NamedTuple):
    id: str = ""
    """Empty: none."""
    is_last: bool = False
    """Whether this is the chat's last request, whose pages are then not pinned."""


NO_SESSION = ChatSession()


@dataclass(eq=False, slots=True)
class HeldPages:
    """A request's pages of the first group. `RequestPages` publishes and returns them."""

    pages: list[int] = field(default_factory=list)
    """Page i holds positions [i * page_size, (i + 1) * page_size)."""
    num_published: int = 0
    """Leading pages that are in the prefix cache."""
    num_promised: int = 0
    """Further pages that will be needed and are counted as taken."""
    leaf: Node | None = None
    """The prefix cache's node of the last published page, if known."""
    partial_page: int | None = None
    """During admission: a cached page whose first tokens continue the request after `pages`."""
    num_partial_tokens: int = 0
    """Number of matching tokens in that page."""
    incoming: IncomingPages | None = None
    """Outcome of a load by layer that still writes some of these pages; None: all are there."""
    is_private: bool = False
    """Whether versions of the weights have changed since the first of these pages, so that the
    pages are of use to this request alone.
    """

    def add(self, pages: Sequence[int]) -> None:
        """Adds pages that no step of the request has filled."""
        self.pages += pages

    def await_load(self, incoming: IncomingPages) -> None:
        """Notes that a load by layer still writes some of these pages."""
        self.incoming = incoming

    def end_load(self) -> None:
        """Notes that all pages are there."""
        self.incoming = None

    def keep_private(self) -> None:
        """Keeps pages computed from now on out of the prefix cache."""
        self.is_private, self.leaf = True, None

    def promise(self, memory: PageMemory, num_pages: int) -> None:
        memory.promise(num_pages)
        self.num_promised += num_pages

    def take_promised(self, memory: PageMemory, num_pages: int, namespace: bytes) -> list[int]:
        """The allocated pages are not yet among `pages`."""
        pages = memory.allocate(num_pages, namespace, promised=True)
        self.num_promised -= num_pages
        return pages

    def unpromise(self, memory: PageMemory, num_pages: int) -> None:
        memory.unpromise(num_pages)
        self.num_promised -= num_pages


@dataclass(eq=False, slots=True)
class PageSources:
    """Where a request's missing pages may come from. `weft.engine.sources` decides about them."""

    candidates: list[FillCandidate] = field(default_factory=list)
    """Fillers not yet tried, best first."""
    is_overflow: bool | None = None
    """Whether the prompt is computed here only because the prefill worker has other work. None
    until the place of computing is decided.
    """
    lookup_until: float = 0.0
    """Time until which the KV store's answer is awaited; 0: no answer is awaited."""
    num_stored_pages: int | None = None
    """Leading pages of the prompt that the KV store holds; None: unknown."""
    skips_tiers: bool = False
    """Whether a load from a tier was given up. Until the request is preempted again, its pages come
    from other sources.
    """

    loads_whole: bool = False
    """Whether a load by layer has failed, so that pages are loaded whole before a step."""

    @property
    def may_overflow(self) -> bool:
        """`is_overflow`; while that is None, whether a prefill worker could compute the prompt at
        all.
        """
        if self.is_overflow is None:
            return any(one.kind == "prefill" for one in self.candidates)
        return self.is_overflow


@dataclass(eq=False, slots=True)
class SharedPrefix:
    """The request that computes or receives pages which a waiting request wants to share. Only
    `PrefixSharing` changes it.
    """

    leader: Request | None = None
    num_leader_pages: int = 0
    """Number of the leader's published pages when it was last checked."""
    has_followed: bool = False


@dataclass(eq=False, slots=True)
class DraftState:
    """Facts that the drafter and its gate (`weft.engine.features.speculative`) know of a
    request.
    """

    wanted: bool = False
    acceptance: Acceptance | None = None
    is_behind: bool = False
    """Whether the draft model has not yet read all of the tokens. A missing draft then says nothing
    about the drafter.
    """
    lacks_room: bool = False
    """Whether the draft model has no pages or positions for the request. A missing draft then does
    not count against the drafter.
    """


@dataclass(eq=False, slots=True, kw_only=True)
class Beams:
    """The texts of a beam search, each of which is a request with a slot and pages of its own. They
    are RUNNING together and take part in the same steps: slots and pages for all of them, up to
    their last token, are reserved when the first one is admitted.
    """

    search: BeamSearch
    requests: list[Request]
    """By place. The first is the one that was submitted; the others are there after its prompt."""
    slots: list[int] = field(default_factory=list)
    """Reserved for the others."""
    num_pages: int
    """Pages that each text needs after the full ones of the prompt, which all share."""
    tells_logprobs: bool
    """Whether the client wants the log-probabilities of the tokens."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One sample of one submit, or one fill job of a prefill worker (`fill`).

    Tokens [0, num_computed) have their KV in its pages. Steps under way compute the next
    `num_launched`.
    """

    key: RequestKey
    sample: int
    tokens: list[int]
    """Prompt and generated tokens, without those that a step under way is sampling."""
    num_prompt_tokens: int
    params: SamplingParams
    stop: StopCriteria
    max_tokens: int
    """Most tokens to generate; fits the context."""
    eos_token_ids: frozenset[int]
    seed: int
    top_logprobs: int | None
    scales_logprobs: bool = False
    """Whether log-probabilities of its tokens are of logits divided by the temperature."""
    prompt_logprobs: int | None = None
    """Number of alternatives wanted for each prompt token; the prompt is then computed again. None:
    no log-probabilities are wanted, or all have been sent.
    """
    routes_from: int | None = None
    """Position from which on routes of experts are reported at its end; None: they are not."""
    keys: PageKeys
    arrival: int
    """Order of submission over the engine's life."""
    first_token_deadline: float
    deadline: float
    timeline: Timeline
    pool: PoolingParams | None = None
    """The vectors of its prompt that are wanted in place of tokens; None: the request generates, or
    fills.
    """
    fill: FillTask | None = None
    """None: the request is this worker's own."""
    cache_salt: str = ""
    namespace: bytes = b""
    spans: Sequence[MediaSpan] = ()
    """Media of its prompt, in order."""
    tail_spans: Sequence[MediaSpan] = ()
    """A fill job's: media whose rows its owner asks for (`KvHandle.tail_spans`)."""
    uncut_spans: Sequence[MediaSpan] = ()
    """Those that no step ends within, since their tokens attend to one another both ways."""
    axes: MediaPositions | None = None
    """Positions along three axes; None: all rotations are by the tokens' positions."""
    adapter: bytes = b""
    """Content digest of its adapter; empty: the base model."""
    adapter_slot: int = 0
    """Slot of its adapter in the device's tables, while it has a `slot`; 0: no adapter."""
    priority: int = 0
    """A lower number is more urgent."""
    tenant: str = ""
    """Tenant that is charged, where tenants are treated fairly."""
    num_charged_tokens: int = 0
    """Generated tokens charged to the tenant so far."""
    chat: ChatSession = NO_SESSION
    traceparent: str = ""
    digests: Sequence[int] | None = None
    """Digests of its pages, if they are known; None: shipping computes them."""
    held: HeldPages = field(default_factory=HeldPages)
    sources: PageSources = field(default_factory=PageSources)
    sharing: SharedPrefix = field(default_factory=SharedPrefix)
    drafts: DraftState = field(default_factory=DraftState)
    state: State = State.WAITING
    slot: int = -1
    num_computed: int = 0
    num_launched: int = 0
    """Number of positions that launched and uncommitted steps compute. While it is not 0, steps may
    read and write the request's present and former pages.
    """
    decodes_from: int = 0
    """Position from which on the running request brings one token per step."""
    num_verifying: int = 0
    """Number of steps under way that may accept drafts of the request. Only the device knows their
    outcome.
    """
    state_end: int = 0
    """End position of the hidden state that the slot keeps for a draft model."""
    num_found_tokens: int = 0
    """Cached tokens at the last lookup, while the request waits."""
    num_cached_tokens: int = 0
    """Prompt tokens of this request whose KV was cached, so that it was not computed."""
    is_sibling: bool = False
    """Whether it was forked from another sample of its prompt, whose cached tokens count for both.
    """
    unforked_samples: dict[int, list[int]] = field(default_factory=dict)
    """First sample only: samples to be forked once the prompt's KV exists, each with the tokens
    that it has generated elsewhere.
    """
    old_versions: list[tuple[str, int]] = field(default_factory=list)
    """Names of the weights' versions before the present one, and how many tokens were generated
    when each ended.
    """
    beams: Beams | None = None
    """The beam search of which it is a text; None: its tokens are drawn."""
    error: WeftError | None = None
    end_token_ids: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        self.end_token_ids = self.eos_token_ids.union(self.stop.stop_token_ids)

    @property
    def num_slots(self) -> int:
        """Slots that its admission needs."""
        return 1 if self.beams is None else self.beams.search.width

    @property
    def num_beam_pages(self) -> int:
        """Pages that its admission needs in addition to those of its tokens."""
        beams = self.beams
        return 0 if beams is None else beams.num_pages * beams.search.width - 1

    @property
    def is_fill(self) -> bool:
        return self.fill is not None

    @property
    def lease_id(self) -> bytes:
        """Empty: it is no fill."""
        return b"" if self.fill is None else self.fill.lease_id

    @property
    def companion_pages(self) -> int:
        return 0 if self.fill is None else self.fill.companion_pages

    @property
    def pages(self) -> list[int]:
        """Pages of the first group, for the filler when this is its job."""
        return self.held.pages

    @property
    def draws_in_turn(self) -> bool:
        """Whether sampling a token depends on the tokens just before it, so that tokens of one step
        are sampled one after another.
        """
        params = self.params
        return params.counts_tokens or params.constraint is not None or self.stop.min_tokens > 0

    @property
    def draws(self) -> bool:
        """Whether tokens are generated after its prompt."""
        return not self.is_fill and self.pool is None

    @property
    def num_reusable_tokens(self) -> int:
        """Number of leading tokens that are not computed if their KV is cached. A request computes
        at least its last token, unless it is a fill job. It computes all of them if
        log-probabilities or vectors of the whole prompt are wanted.
        """
        pool = self.pool
        if pool is not None and pool.output == "alignment":
            return pool.aligned_from
        is_computed_anew = pool is not None and (pool.wants_all_rows or pool.is_whole)
        if is_computed_anew or self.prompt_logprobs is not None:
            return 0
        return len(self.tokens) - (not self.is_fill)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def awaits_first_token(self) -> bool:
        """Whether this engine has sampled no token for the request yet. A resumed request may have
        tokens from elsewhere.
        """
        return self.timeline.first_token_s is None

    @property
    def num_pending(self) -> int:
        """Number of tokens whose KV is still to be computed by steps that have not begun."""
        return len(self.tokens) - self.num_computed - self.num_launched

    def continue_at(self, position: int, *, was_cached: bool) -> None:
        """Notes that the KV of the tokens before a position has come from elsewhere.

        Args:
            was_cached: Whether it was there before, so that nobody computed it for this request.
        """
        if was_cached:
            self.num_cached_tokens += position - self.num_computed
        self.num_computed = position

    @property
    def num_to_compute(self) -> int:
        """`num_pending` less the tokens that were cached at the last lookup."""
        return self.num_pending - (0 if self.held.pages else self.num_found_tokens)


def end_of(request: Request, token: int, num_generated: int) -> tuple[str, int | None] | None:
    """Why a sample ends with its newest token: (reason, the stop token if one matched); None: it
    continues. `num_generated` includes the newest token.
    """
    stop = request.stop
    is_eos = token in request.eos_token_ids
    if is_eos and request.params.constraint is not None:
        return "stop", token  # Nothing can follow: its grammar is complete.
    if num_generated >= stop.min_tokens and (
        (is_eos and not stop.ignore_eos) or token in stop.stop_token_ids
    ):
        return "stop", token
    return ("length", None) if num_generated >= request.max_tokens else None
