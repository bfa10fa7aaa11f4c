"""A client's request, in one form for both faces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.contract.request import PARAMETERS, Constraint
from weft.contract.tasks import Output
from weft.gateway.admission.keys import Tenant

MIN_TARGET_S = 0.001
MAX_TARGET_S = 3600.0


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
        """Outcome of an answered request.

        Args:
            first_token_s: Measured time to the first token; None: there was no token.
            between_tokens_s: Measured mean time between tokens; None: there were fewer than two.

        Returns:
            met, late_first_token or slow_tokens.
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
class ChatPrompt:
    """A conversation to answer."""

    messages: tuple[Mapping[str, Any], ...]
    """Messages, each with `role` and `content`, strings. One with `tool_calls` has them in OpenAI's
    form, but for the arguments: an object, or the text where a client gave none.
    """
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model is shown, in OpenAI's form."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairPrompt:
    """Two texts whose relation is scored; a request's `wants` decides how a model reads them."""

    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WrappedPrompt:
    """A text between two fixed ones, which are never cut."""

    head: str
    text: str
    tail: str
    needed_chars: int = 0
    """Characters at the start of `text` that must not be cut, nor the first one behind them."""


Prompt = TextPrompt | TokenPrompt | ChatPrompt | PairPrompt | WrappedPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Wants:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """The parameters that the client gave, by their names in `PARAMETERS`; all of them but perhaps
    the seed after `with_defaults`.
    """
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None
    speculate: bool = True
    """Whether the worker may speculate; the text is the same."""

    @property
    def n(self) -> int:
        """Samples of each prompt."""
        return int(self.numbers.get("n", 1))

    @property
    def seed(self) -> int | None:
        """Seed, 64 bits, signed or unsigned; None: drawn by the gateway."""
        seed = self.numbers.get("seed")
        return None if seed is None else int(seed)

    def with_defaults(self, of_model: Mapping[str, float]) -> Sampling:
        """A copy with a value of every parameter.

        Args:
            of_model: The model's own defaults.
        """
        defaults = {name: one.default for name, one in PARAMETERS.items() if name != "seed"}
        return replace(self, numbers={**defaults, **of_model, **self.numbers})


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """Conditions that end a sample; bounds are those of `weft.v1.StopCriteria`."""

    max_tokens: int | None = None
    """Most tokens to generate; None: up to the context."""
    is_bounded: bool = False
    """Whether a `max_tokens` above what the prompt leaves of the context is lowered, with a
    warning; otherwise it is refused.
    """
    is_echo_alone: bool = False
    """Whether the prompt is only scored: the one token that is drawn is not shown, and it needs no
    room in the context.
    """
    min_tokens: int = 0
    stops: tuple[str, ...] = ()
    stop_regexes: tuple[str, ...] = ()
    """Regular expressions that end the text where a match is complete."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One request of one client: one or more prompts, `sampling.n` samples of each."""

    request_id: str
    """Id made by the gateway, never by a client: it is the key on Sessions. At most 52 bytes."""
    client_request_id: str = ""
    """Id given by the client, which need not be unique; empty: none."""
    header_request_id: str = ""
    """The call's `x-request-id` where the body gives another name; empty: none."""
    model: str
    """Name of a model, an adapter or `model:adapter`. Empty: the served model."""
    prompts: tuple[Prompt, ...]
    sampling: Sampling = field(default_factory=Sampling)
    stopping: Stopping = field(default_factory=Stopping)
    top_logprobs: int | None = None
    """Number of alternatives at each position; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """Number of alternatives at each position of a prompt; None: no log-probabilities of it."""
    calls: Calls | None = None
    """Calls that answers may have; None: they are text."""
    constraint_param: str = "constraint"
    """The client's name for the constraint, for error messages."""
    max_tokens_param: str = "max_tokens"
    top_logprobs_param: str = "top_logprobs"
    prompt_logprobs_param: str = "prompt_logprobs"
    skip_special_tokens: bool = True
    timeout_s: float | None = None
    """Time limit given by the client; the gateway's own limit applies as well."""
    first_token_timeout_s: float | None = None
    """Time limit for the first token of each prompt; None: only the one for the whole request."""
    cache_salt: str = ""
    priority: int = 0
    """Priority, a lower number is more urgent; bounds are those of `weft.v1.Submit`."""
    routing_key: str = ""
    """Routing key, for policies that use keys; empty: none."""
    worker: WorkerChoice | None = None
    """The decode worker that the client names; None: the router chooses."""
    session_id: str = ""
    """Chat session whose KV is kept for a while; empty: none."""
    ends_session: bool = False
    """Whether the chat session ends with it."""
    traceparent: str = ""
    targets: Targets = NO_TARGETS
    """Latency targets of the client; those of its tenant apply where it gives none."""
    tenant: Tenant | None = None
    """Tenant of the request; None: the gateway asks for no API keys."""
    wants: Wants | None = None
    """Vectors that are wanted; None: tokens are."""
    adapter: ResolvedAdapter | None = None
    """Adapter that `model` refers to, once resolved; None: the base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """One prompt after templating, tokenisation and checks."""

    ids: list[int]
    max_tokens: int = 0
    """Most tokens of each sample; prompt and output together fit the context. 0: none is drawn, or
    the limit is not settled yet.
    """
    begins_reasoning: bool = False
    """Whether the prompt ends within the model's reasoning, or else the model begins with it."""
    segment_start: int = 0
    """Position of the first token of the second of a pair of texts; 0: there is one text."""
    has_reasoned: bool = False
    """Whether the prompt ends behind the model's reasoning, for example with an empty one."""
