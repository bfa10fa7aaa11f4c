"""Messages from gateways to an engine, and its reports about their requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from weft.contract.errors import WeftError, error_class
from weft.contract.handle import ADAPTER_DIGEST_BYTES
from weft.contract.request import (
    MAX_PRIORITY,
    MAX_SALT_BYTES,
    MAX_SESSION_ID_BYTES,
    MAX_TENANT_BYTES,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    PromptLogprobs,
    SamplingParams,
    StopCriteria,
    TokenLogprob,
)
from weft.contract.spans import MAX_SPANS, MediaSpan
from weft.contract.tasks import PooledVectors, PoolingParams
from weft.contract.timeline import FillCandidate, Timeline
from weft.contract.token_ids import TokenIds
from weft.contract.wire import wire

MAX_ID_BYTES = 64
MAX_CANDIDATES = 64
MAX_TIMEOUT_S = 86_400.0
MAX_ROUTE_BYTES = 32 << 20
"""Most bytes of `Routes.numbers` of all samples of a request."""


@dataclass(slots=True, kw_only=True)
class SampleProgress:
    """Progress of one sample of a resumed request."""

    sample: int
    tokens: list[int]
    """Tokens that other owners have generated so far."""
    is_finished: bool = False
    """Whether the sample is complete; the engine neither runs it again nor reports on it."""


@dataclass(slots=True, kw_only=True)
class Submit:
    """A request for this owner; its key is (gateway, request_id, attempt)."""

    gateway: int
    request_id: str = field(metadata=wire(least=1, most=MAX_ID_BYTES))
    attempt: int
    prompt: TokenIds
    sampling: SamplingParams
    stop: StopCriteria
    top_logprobs: int | None = field(
        default=None, metadata=wire(name="logprobs.top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    )
    """Number of alternatives per token; None: no log-probabilities."""
    scales_logprobs: bool = field(default=False, metadata=wire(name="logprobs.scaled"))
    """Whether they are of logits divided by the temperature."""
    prompt_logprobs: int | None = field(
        default=None,
        metadata=wire(name="prompt_logprobs.top_logprobs", low=0, high=MAX_TOP_LOGPROBS),
    )
    """Number of alternatives per prompt token; None: no log-probabilities of the prompt."""
    routes_from: int | None = field(default=None, metadata=wire(low=0, high=MAX_TOKENS))
    """Position from which on the routes of experts are wanted; None: they are not."""
    pool: PoolingParams | None = None
    """Parameters of a request for vectors; None: the request wants tokens."""
    candidates: list[FillCandidate] = field(
        default_factory=list, metadata=wire(name="prefill_candidates", most=MAX_CANDIDATES)
    )
    first_token_timeout_s: float = field(
        default=MAX_TIMEOUT_S, metadata=wire(low=0.0, high=MAX_TIMEOUT_S, clamps=True)
    )
    total_timeout_s: float = field(
        default=MAX_TIMEOUT_S, metadata=wire(low=0.0, high=MAX_TIMEOUT_S, clamps=True)
    )
    cache_salt: str = field(default="", metadata=wire(most=MAX_SALT_BYTES))
    traceparent: str = ""
    priority: int = field(default=0, metadata=wire(low=-MAX_PRIORITY, high=MAX_PRIORITY))
    """Priority; a lower number is more urgent."""
    tenant: str = field(default="", metadata=wire(most=MAX_TENANT_BYTES))
    """Tenant that is charged, where tenants are treated fairly; empty: one shared tenant."""
    adapter: bytes = field(
        default=b"",
        metadata=wire(name="adapter.digest", least=ADAPTER_DIGEST_BYTES, most=ADAPTER_DIGEST_BYTES),
    )
    """Content digest of the adapter to use; empty: the base model."""
    session_id: str = field(default="", metadata=wire(most=MAX_SESSION_ID_BYTES))
    """Chat session whose pages the engine pins; empty: none."""
    ends_session: bool = field(default=False, metadata=wire(name="end_session"))
    """Whether this is the last request of the session."""
    progress: list[SampleProgress] = field(default_factory=list)
    """Progress in earlier attempts; samples without an entry start afresh."""
    spans: list[MediaSpan] = field(default_factory=list, metadata=wire(most=MAX_SPANS))
    """Media of the prompt, in order."""


@dataclass(slots=True, kw_only=True)
class Cancel:
    """Ends a request or one of its samples."""

    gateway: int
    request_id: str
    attempt: int
    sample: int | None = None


@dataclass(slots=True, kw_only=True)
class SessionEnd:
    """Ends a chat session; the engine releases its pins."""

    cache_salt: str
    session_id: str


@dataclass(slots=True, kw_only=True)
class Ping:
    """Asks whether the loop is alive and whether it has these requests."""

    gateway: int
    nonce: int
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Requests asked about: (request id, attempt)."""
    expects_constraints: bool = False
    """Whether constrained requests may follow."""


@dataclass(slots=True, kw_only=True)
class Failure:
    """A `WeftError` as plain data."""

    reason: str
    message: str
    stage: str = ""
    param: str | None = None
    retry_after_s: float | None = None

    def to_error(self) -> WeftError:
        return error_class(self.reason)(
            self.message, stage=self.stage, param=self.param, retry_after_s=self.retry_after_s
        )


@dataclass(slots=True, kw_only=True)
class Accepted:
    """Confirms that the request is queued."""

    request_id: str
    attempt: int


class Tokens(NamedTuple):
    request_id: str
    attempt: int
    sample: int
    first_index: int
    """Index of the first of these among the generated tokens."""
    ids: list[int]
    logprobs: list[TokenLogprob]
    """Log-probabilities, one for each of `ids`, or none."""


class TokenColumns(NamedTuple):
    """One new token for each of many samples, as columns; a row holds the data of a `Tokens`."""

    request_ids: list[str]
    attempts: list[int]
    samples: list[int]
    indices: list[int]
    """Index of each token among its sample's generated tokens."""
    ids: list[int]
    logprobs: dict[int, TokenLogprob]
    """Log-probabilities by row, of the samples that want them."""

    def of_rows(self, rows: Sequence[int]) -> TokenColumns:
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
        """Yields the rows as `Tokens`."""
        for row, (request_id, attempt, sample, index, token) in enumerate(self.rows()):
            logprobs = [self.logprobs[row]] if row in self.logprobs else []
            yield Tokens(request_id, attempt, sample, index, [token], logprobs)


class Routes(NamedTuple):
    """The experts of consecutive positions of a sample, sent before its end."""

    request_id: str
    attempt: int
    sample: int
    first_position: int
    layers: int
    """All layers of the model; those without experts have zeros."""
    top_k: int
    number_bytes: int
    """1 or 2."""
    numbers: bytes
    """[positions, layers, top_k], unsigned, little-endian."""

    @property
    def position_bytes(self) -> int:
        """Bytes of `numbers` for one position."""
        return self.layers * self.top_k * self.number_bytes

    def array(self) -> NDArray[np.generic]:
        """[positions, layers, top_k]."""
        flat = np.frombuffer(self.numbers, f"<u{self.number_bytes}")
        return flat.reshape(-1, self.layers, self.top_k)


@dataclass(slots=True, kw_only=True)
class Preempted:
    """A running sample was put back into the queue."""

    request_id: str
    attempt: int
    sample: int


@dataclass(slots=True, kw_only=True)
class VersionSpan:
    """Tokens of a sample that one version of the weights has drawn: start <= index < end."""

    version: str
    """Empty: another worker's, which is not known here."""
    start: int
    end: int


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
    weight_versions: list[VersionSpan] = field(default_factory=list)
    """Which weights have drawn its tokens, in order; empty: those of the engine's start."""


@dataclass(slots=True, kw_only=True)
class Failed:
    """A whole request was refused or has failed."""

    request_id: str
    attempt: int
    failure: Failure
    timeline: Timeline | None = None
    """Timeline of the request's first sample, if it was queued."""


@dataclass(slots=True, kw_only=True)
class Pong:
    nonce: int
    unknown: list[tuple[str, int]] = field(default_factory=list)
    """Requests that the ping asked about and the engine does not have."""


@dataclass(slots=True, kw_only=True)
class GatewayBatch:
    """Everything that one step produced for one gateway."""

    gateway: int
    accepted: list[Accepted] = field(default_factory=list)
    computed_here: list[tuple[str, int]] = field(default_factory=list)
    """Requests (id, attempt) whose prompt this engine computes itself, although prefill workers
    were named for it.
    """
    tokens: list[Tokens] = field(default_factory=list)
    """Tokens of samples that may get several in a step, and repeated tokens. They precede the
    tokens that `columns` has for the same sample."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    vectors: list[PooledVectors] = field(default_factory=list)
    routes: list[Routes] = field(default_factory=list)
    columns: list[TokenColumns] = field(default_factory=list)
    has_first_tokens: bool = False
    """Whether a sample has its first tokens of this attempt here, or the first after a pre-emption:
    a client waits for them.
    """
    preempted: list[Preempted] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    pongs: list[Pong] = field(default_factory=list)

    @property
    def may_wait(self) -> bool:
        """Whether the batch has only tokens, each of which follows one that was already sent."""
        if self.accepted or self.computed_here or self.preempted:
            return False
        if self.prompt_logprobs or self.vectors:
            return False
        return not (self.has_first_tokens or self.finished or self.failed or self.pongs)

    def all_tokens(self) -> Iterator[Tokens]:
        """Yields `tokens`, then the tokens of `columns`."""
        yield from self.tokens
        for columns in self.columns:
            yield from columns.entries()
