"""A client's request, in one form for all dialects.

A dialect makes a `RawRequest` of a call: parameters that the client gave, under the names of
`weft.contract.request`. `weft.gateway.generation.complete` makes of it the `GenerateRequest`, in
which every parameter has its value and which does not change any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from weft.contract.request import (
    BeamParams,
    CallParams,
    Constraint,
    SamplingParams,
    StopCriteria,
    TimeTokens,
)
from weft.contract.spans import Media, MediaSpan
from weft.contract.tasks import Output
from weft.gateway.admission.keys import Tenant
from weft.gateway.long_text import LongText

FileKind = Literal["image", "audio", "video"]
"""Kinds of files in chats. The media of a video are images."""
LoadFormat = Literal["TEXT", "JSON"]
"""Form of the mesh's load in the header of an answer."""


@dataclass(frozen=True, slots=True)
class Targets:
    """Latency targets in seconds; None: no target."""

    first_token_s: float | None = None
    """Time from the request's arrival at the gateway to its first token."""
    between_tokens_s: float | None = None
    """Mean time between its tokens, after the first."""
    granted: Targets | None = field(default=None, compare=False, repr=False)
    """Targets that the request would have by its tenant; None: the same as its own."""

    @property
    def pace_s(self) -> float | None:
        """Time between tokens for the sake of which other requests may be held. A client's own
        tighter target does not count, only the tenant's.
        """
        if self.granted is None:
            return self.between_tokens_s
        granted_s = self.granted.between_tokens_s
        return None if granted_s is None else max(granted_s, self.between_tokens_s or 0.0)

    def __bool__(self) -> bool:
        return self.first_token_s is not None or self.between_tokens_s is not None

    def over(self, other: Targets) -> Targets:
        """These targets, completed by the other's."""
        return Targets(
            other.first_token_s if self.first_token_s is None else self.first_token_s,
            other.between_tokens_s if self.between_tokens_s is None else self.between_tokens_s,
            other,
        )

    def outcome(self, first_token_s: float | None, between_tokens_s: float | None) -> str:
        """met, late_first_token or slow_tokens, by the measured times of an answered request; None:
        there was no token, or there were fewer than two.
        """
        target_s = self.first_token_s
        if target_s is not None and (first_token_s is None or first_token_s > target_s):
            return "late_first_token"
        target_s = self.between_tokens_s
        if target_s is not None and between_tokens_s is not None and between_tokens_s > target_s:
            return "slow_tokens"
        return "met"


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A text to continue."""

    text: str
    add_special_tokens: bool = True
    """Whether the tokenizer may add its beginning-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Tokens to continue."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipPrompt(TokenPrompt):
    """Tokens to continue, of which the first are the rows of a clip of audio."""

    clip: Media = field(repr=False)
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaFile:
    """An image, a clip of audio or a video, as a client sent it; nothing of it is checked yet."""

    source: str | bytes | LongText = field(repr=False)
    """A URL, base64 alone, or the file itself."""
    where: str
    """Path of the part in the client's body."""
    kind: str
    """What the client's API calls such a part."""
    type_param: str
    """Path of the field that says what the part is."""
    modality: FileKind = "image"
    is_coarse: bool = False
    """Whether few tokens are wanted, at less detail."""
    is_of_tool: bool = False
    """Whether a tool has returned it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to answer."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages, each with `role` and `content`: a string or, in a message with images or audio, a
    list of parts in their order, each `{"type": "image"}`, `{"type": "audio"}`,
    `{"type": "video"}` or `{"type": "text", "text": ...}`. One with `tool_calls` has them in
    OpenAI's form, but for the arguments: an object, or the text where a client gave none.
    """
    files: tuple[MediaFile, ...] = ()
    """The images and clips of all messages, in order."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model is shown, in OpenAI's form."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """Two texts whose relation is scored; a request's `pooling` decides how a model reads them."""

    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedPrompt:
    """A text between two fixed ones, which are never cut."""

    head: str
    text: str
    tail: str
    needed_chars: int = 0
    """Characters at the start of `text` that must not be cut, nor the character that
    follows them.
    """


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PairPrompt | WrappedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingOptions:
    """Vectors that a request wants of its prompts in place of tokens."""

    output: Output
    dimensions: int | None = None
    """Leading entries of embeddings; None: all."""
    normalises: bool | None = None
    """Whether embeddings get length 1; None: as the model's files say."""
    truncate_tokens: int | None = None
    """Tokens to which longer prompts are cut; 0: the longest that the model takes. None: longer
    ones are refused.
    """
    prompt_name: str | None = None
    """The model's prompt that goes ahead of texts; None: its default one."""
    prompt_field: str = "prompt_name"
    """The field of the body that names it."""
    prompt_choices: tuple[str, ...] = ()
    """Prompts of which the first that the model has takes the place of its default one."""
    instruction: str = ""
    """What makes a document relevant; empty: the model's default."""
    label_ids: tuple[int, ...] = ()
    """Tokens whose logits make scores, set once the model is known."""
    aligned_from: int = 0
    num_frames: int = 0
    """As in `weft.contract.tasks.PoolingParams`, for alignments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of tools that an answer may have."""

    is_demanded: bool = False
    """Whether the answer is nothing but calls; its constraint says so."""
    name: str = ""
    """Function whose arguments are the answer; empty: the answer names what it calls."""
    most: int | None = None
    """Most calls; None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChoice:
    """The decode worker that a request names; one of the two is set."""

    worker_id: str = ""
    rank: int | None = None
    """Number of the worker among those of its model, in the order of their ids."""
    param: str
    """The client's name for it, for error messages."""


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """The adapter that a name referred to when the request came; it does not change any more."""

    name: str
    digest: bytes
    """Content digest, 32 bytes."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """Facts about a request taken from the call itself."""

    request_id: str
    """Id made by the gateway, never by a client: it is the key on Sessions. At most 52 bytes."""
    client_request_id: str = ""
    """Id given by the client or the REST edge; empty: none that is usable."""
    timeout_s: float | None = None
    """The lesser of the call's deadline and the metadata `x-request-timeout-ms`; None: there is
    neither.
    """
    traceparent: str = ""
    """Trace context; well-formed, or empty."""
    tenant: Tenant | None = None
    """Tenant of the call; None: the gateway asks for no API keys."""
    routing_key: str = ""
    """Value of the metadata `x-routing-key`; empty: none."""
    targets: Targets = NO_TARGETS
    """Targets from the metadata `x-ttft-target-ms` and `x-itl-target-ms`."""
    first_token_timeout_s: float | None = None
    """Time limit from the metadata `x-first-token-timeout-ms`; None: none."""
    worker: WorkerChoice | None = None
    """Decode worker from the metadata `x-worker-id` or `x-data-parallel-rank`; None: none."""
    load_format: LoadFormat | None = None
    """Form of the mesh's load that the metadata `endpoint-load-metrics-format` asks for; None: it
    is not asked for.
    """

    @property
    def tenant_name(self) -> str:
        """Name of its tenant; empty for a caller without an API key."""
        return "" if self.tenant is None else self.tenant.name


@dataclass(frozen=True, slots=True, kw_only=True)
class RawRequest:
    """A request as its dialect has read it; nothing of it is checked yet."""

    call: CallFacts
    own_id: str = ""
    """The client's name for the request in the body, in place of that of the call; empty: none."""
    model: str = ""
    """Name of a model, an adapter or `model:adapter`. Empty: the served model."""
    prompts: tuple[Prompt, ...]
    given: Mapping[str, Any] = field(default_factory=dict)
    """The parameters that the client gave, by their names in `PARAMETERS`."""
    names: Mapping[str, str] = field(default_factory=dict)
    """The client's names of parameters and of `constraint`, for error messages, where they are
    not those of `PARAMETERS`.
    """
    constraint: Constraint | None = None
    time_tokens: TimeTokens | None = None
    """Rules for tokens that say times; None: no token does."""
    beams: BeamParams | None = None
    """A search for the likeliest text; None: tokens are drawn."""
    calls: Calls | None = None
    """Calls that answers may have; None: they are text."""
    lowers_max_tokens: bool = False
    """Whether a `max_tokens` above what the prompt leaves of the context is lowered, with a
    warning; otherwise it is refused.
    """
    is_echo_alone: bool = False
    """Whether the prompt is only scored: one token is drawn but not shown, and it needs no room in
    the context.
    """
    pooling: PoolingOptions | None = None
    """Vectors that are wanted; None: tokens are."""
    routes_from: int | None = None
    """Position of the first token whose experts are wanted; None: they are not."""

    def name_of(self, parameter: str) -> str:
        """The client's name of a parameter, or of the constraint."""
        return self.names.get(parameter, parameter)

    @property
    def request_id(self) -> str:
        """The gateway's id of the request."""
        return self.call.request_id

    @property
    def client_request_id(self) -> str:
        """Id given by the client, which need not be unique; empty: none."""
        return self.own_id or self.call.client_request_id

    @property
    def header_request_id(self) -> str:
        """The call's `x-request-id` where the body gives another name; empty: none."""
        # The REST edge gives every call an id, also where the client sent none.
        return self.call.client_request_id if self.own_id else ""

    @property
    def timeout_s(self) -> float | None:
        """Time limit given by the client; the gateway's own limit applies as well."""
        return earliest(self.call.timeout_s, self.given.get("timeout"))

    @property
    def first_token_timeout_s(self) -> float | None:
        """Time limit for the first token of each prompt; None: only that of the whole request."""
        return earliest(self.call.first_token_timeout_s, self.given.get("ttft_timeout"))


def earliest(*limits_s: float | None) -> float | None:
    """The least of several time limits, each of which may be None; None if all are."""
    return min((limit_s for limit_s in limits_s if limit_s is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest(CallParams):
    """One request of one client: one or more prompts, `sampling.n` samples of each.

    Every parameter has its value: the client's, else its tenant's, else the model's, else the
    default. Its salt and session are those of the tenant. What differs between its prompts, such
    as the room in the context, is in `PreparedPrompt`.
    """

    raw: RawRequest
    """What the client sent."""
    prompts: tuple[Prompt, ...]
    """The prompts as the model reads them."""
    sampling: SamplingParams
    """Its seed is that of the first prompt."""
    stop: StopCriteria
    """Without `max_tokens`, an answer may fill the context."""
    seeds: tuple[int, ...]
    """Seed of each prompt, unsigned, 64 bits: the client's, or else a different one for each, so
    that equal prompts get different answers.
    """
    targets: Targets = NO_TARGETS
    """Latency targets of the client; those of its tenant where it gives none."""
    pooling: PoolingOptions | None = None
    """Vectors that are wanted; None: tokens are."""
    adapter: ResolvedAdapter | None = None
    """Adapter that the model's name refers to; None: the base model."""

    @property
    def request_id(self) -> str:
        """The gateway's id of the request."""
        return self.raw.call.request_id

    @property
    def tenant_name(self) -> str:
        """Name of its tenant; empty for a caller without an API key."""
        return self.raw.call.tenant_name


@dataclass(slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt after templating, tokenisation and checks; its preparer fills it."""

    ids: list[int]
    segment_start: int = 0
    """Position of the first token of the second of a pair of texts; 0: there is one text."""
    begins_reasoning: bool = False
    """Whether the prompt ends within the model's reasoning, or else the model begins with it."""
    has_reasoned: bool = False
    """Whether the prompt ends after the model's reasoning, for example with an empty one."""
    max_tokens: int = 0
    """Most tokens of each sample; prompt and output together fit the context. 0: none is drawn."""
    seed: int = 0
    """Seed of its samples in every attempt; unsigned, 64 bits."""
    constraint: Constraint | None = None
    """Constraint of its samples, with the reasoning that may precede the constrained text."""
    spans: tuple[MediaSpan, ...] = ()
    """The tokens of `ids` that stand for media."""
    media: tuple[Media, ...] = ()
    """The media of `spans`, each once."""
