"""What a client asks for, in one form for both faces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.engine.request import Constraint
from weft.gateway.keys import Tenant
from weft.gateway.slo.targets import NO_TARGETS, Targets


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPrompt:
    """A text to continue."""

    text: str
    add_special_tokens: bool = True
    """The tokenizer may add its beginning-of-text token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrompt:
    """Tokens to continue."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to answer."""

    messages: tuple[Mapping[str, Any], ...]
    """Each with `role` and `content`, strings."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn; bounds are those of `weft.v1.SamplingParams`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 = all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """64 bits, signed or not; absent = drawn by the gateway."""
    n: int = 1
    constraint: Constraint | None = None
    speculate: bool = True
    """Tokens may be drafted; the text is the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a sample ends; bounds are those of `weft.v1.StopCriteria`."""

    max_tokens: int | None = None
    """Absent = up to the context."""
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """What the name of an adapter meant when a request came; it does not change any more."""

    name: str
    digest: bytes
    """Of its content, 32 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request of one client: one or more prompts, `sampling.n` samples of each."""

    request_id: str
    """Made by the gateway, never by a client: it is the key on Sessions. At most 52 bytes."""
    client_request_id: str = ""
    """What the client calls it; need not be unique. Empty = nothing."""
    model: str
    """A model, an adapter or `model:adapter`. Empty = the served model."""
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    top_logprobs: int | None = None
    """Alternatives at each position; absent = no log-probabilities."""
    constraint_param: str = "constraint"
    """The client's name for the constraint, for error messages; so are the next two."""
    max_tokens_param: str = "max_tokens"
    top_logprobs_param: str = "top_logprobs"
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    """Time that the client gives; the gateway's own bound applies as well."""
    cache_salt: str = ""
    priority: int = 0
    """Less is more urgent; bounds are those of `weft.v1.Submit`."""
    routing_key: str = ""
    """Requests of one key belong together, for policies that know keys; empty = none."""
    session_id: str = ""
    """The chat that it belongs to, whose KV stays for a while; empty = none."""
    ends_session: bool = False
    """The chat is over with it."""
    traceparent: str = ""
    targets: Targets = NO_TARGETS
    """Latency that the client asks for; its tenant's targets apply where there is none here."""
    tenant: Tenant | None = None
    """Whose it is; absent = the gateway asks for no API keys."""
    adapter: Adapter | None = None
    """What `model` means beside the base model, once it is resolved; absent = nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt after templating, tokenisation and checks."""

    ids: list[int]
    max_tokens: int
    """Tokens that each sample may have; prompt and output fit the context together."""
