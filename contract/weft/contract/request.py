"""The parameters of a request, each declared once: type, default, range, and names for clients.

Bodies of dialects, their checks and documents, models' defaults and the wire derive from the fields
of `SamplingParams`, `StopCriteria` and `CallParams`; `PARAMETERS` lists them by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, NamedTuple

from weft.contract.wire import wire

MAX_TOP_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 100.0
"""Largest repetition penalty; logits are divided by the penalty and must stay finite."""
MAX_PRIORITY = 1_000_000
"""Priorities are -MAX_PRIORITY to MAX_PRIORITY; lower is more urgent."""
MAX_TENANT_BYTES = 64
MAX_SALT_BYTES = 128
MAX_SESSION_ID_BYTES = 128
"""Longest client-chosen name of a chat session, bytes."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]
ConstraintKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]
MAX_MARK_TOKENS = 16
"""Most tokens in the sequence that ends reasoning, and most alternatives to a constraint."""
MAX_CONSTRAINT_BYTES = 64 << 10
"""Largest text of a constraint, or of all its choices together, bytes."""
MAX_WHITESPACE_PATTERN = 256
"""Most characters of a pattern of `Constraint.whitespace`."""
_BLANK = r"(?:[ \t\n\r]|\\[nrts]|\\x(?:20|0[9aAdD]))"
_BLANKS = re.compile(
    rf"(?:{_BLANK}|\[{_BLANK}++\]|\((?:\?:)?|[)|*+?^$]|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*+"
)
"""Regular expressions whose only characters are blanks of JSON."""


def check_whitespace(pattern: str) -> None:
    """Raises ValueError for a pattern of `Constraint.whitespace` that is too long, or may match
    other texts than blanks, tabs and line breaks.
    """
    if len(pattern) > MAX_WHITESPACE_PATTERN or not _BLANKS.fullmatch(pattern):
        raise ValueError(
            f"must be a regular expression of at most {MAX_WHITESPACE_PATTERN} characters that "
            r"matches nothing but blanks, tabs and line breaks, such as [ \n]{0,4}"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The tokens that begin and end the reasoning at the start of a sample."""

    begin: int | None = None
    """Token that begins the reasoning if it is the sample's first token; None: the prompt has
    already begun it."""
    end: tuple[int, ...] = field(metadata=wire(least=1, most=MAX_MARK_TOKENS, param="constraint"))
    """Sequence of tokens that ends the reasoning."""
    until: int | None = None
    """Token that must follow `end`, directly or later; None: no token must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A constraint on the whole text of a sample, or on the text that follows its reasoning."""

    kind: ConstraintKind
    text: str = ""
    """The schema as JSON, the regular expression or the grammar; empty for choices."""
    choices: tuple[str, ...] = ()
    """The allowed texts; the sample is one of them."""
    whitespace: str | None = field(
        default=None,
        metadata=wire(name="whitespace_pattern", check=check_whitespace, param="constraint"),
    )
    """Regular expression of the blanks that may stand between two tokens of JSON; empty: none may;
    None: the worker's own form.
    """
    reasoning: Reasoning | None = field(default=None, compare=False)
    """Reasoning that may precede the constrained text; None: none may. Comparisons ignore this
    field and `alternatives`, since they do not change the grammar.
    """
    alternatives: tuple[int, ...] = field(
        default=(), compare=False, metadata=wire(most=MAX_MARK_TOKENS, param="constraint")
    )
    """Tokens that may replace the constrained text; any text may follow such a token."""

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text and of all choices."""
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTokens:
    """Whisper's rules for tokens that say times (arXiv 2212.04356, section 2.3): a sample begins
    with one, texts are between pairs of them, times never decrease, and one is drawn where all of
    them together are likelier than any other token. The token before the first one, which asks for
    none, is never drawn. Log-probabilities are of what these rules and `logit_bias` leave.
    """

    first: int = field(metadata=wire(low=1, param="time_tokens"))
    """The token of time 0; all tokens from it on are times."""
    end: int = field(metadata=wire(low=0, param="time_tokens"))
    """The token that ends a sample; those before it are text."""
    max_initial: int | None = field(default=None, metadata=wire(low=0, param="time_tokens"))
    """Largest time with which a sample may begin, counted from `first`; None: any."""


MAX_BEAMS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamParams:
    """A beam search: the `width` likeliest texts are continued side by side, and the answer is the
    likeliest complete one, with all of its tokens at once. As in transformers with
    `early_stopping=True`, a text that ends counts if it is among the `width` best of its step, and
    the score of a text is its log-probability / tokens ** length_penalty.
    """

    width: int = field(metadata=wire(low=2, high=MAX_BEAMS, param="beams"))
    length_penalty: float = field(default=1.0, metadata=wire(low=-10, high=10, param="beams"))
    patience: float = field(default=1.0, metadata=wire(low=0.1, high=10, param="beams"))
    """The search ends with round(width * patience) complete texts (arXiv 2204.05424)."""


MAX_BIAS = 100.0
"""A value of `logit_bias` is -MAX_BIAS to MAX_BIAS."""
MAX_TOKENS = 2**31 - 1
_MAX_STOPS, _MAX_STOP_BYTES = 16, 256
_MAX_TARGET_MS = 3_600_000

ParameterType = Literal[
    "float", "int", "bool", "str", "tuple[str, ...]", "tuple[int, ...]", "dict[int, float]"
]


class Parameter(NamedTuple):
    """A parameter that requests give, declared once for every dialect, the checks, the documents
    and the wire.
    """

    name: str
    """Its name in its class, and where `names` does not have another."""
    type: ParameterType
    default: Any
    help: str
    low: float = -math.inf
    """Least number, or bytes of a text; of several texts or numbers, of each."""
    high: float = math.inf
    excludes_low: bool = False
    max_entries: int = 0
    """Most entries of a list or a mapping."""
    choices: tuple[str, ...] = ()
    """The only texts that are allowed; empty: any."""
    of_model: bool = False
    """Whether a model's generation_config.json may give another default."""
    says_more: bool = True
    """Whether its description states range and default in addition to `help`."""
    names: Mapping[str, str] = {}
    """Its name in dialects where that differs; empty where a dialect lacks it."""
    aliases: Mapping[float, float | None] = {}
    """Values that clients give for another value; None: for an absent one."""

    def name_in(self, dialect: str) -> str:
        """Its name in a dialect; empty: the dialect lacks it."""
        return self.names.get(dialect, self.name)

    @property
    def description(self) -> str:
        """Purpose, range and default, for clients."""
        if not self.says_more:
            return self.help
        told = [self.help, self._range]
        if self.of_model:
            told.append("default the model's")
        elif self.type == "bool":
            told.append(f"default {str(self.default).lower()}")
        elif self.type in ("float", "int") and self.default is not None:
            told.append(f"default {_shown(self.default)}")
        return "; ".join(filter(None, told))

    @property
    def _range(self) -> str:
        low, high = _shown(self.low), _shown(self.high)
        if self.type in ("bool", "tuple[int, ...]"):
            return f"at most {self.max_entries}" if self.max_entries else ""
        if self.choices:
            return " or ".join(self.choices) + f"; default {self.default}"
        if self.type == "str":
            return f"at most {high} bytes"
        if self.type == "tuple[str, ...]":
            return f"at most {self.max_entries}, of {high} bytes each"
        if self.type == "int" and self.high >= MAX_TOKENS:
            return ""
        above = "above " if self.excludes_low else ""
        return f"{above}{low}" if self.high == math.inf else f"{above}{low} to {high}"


def _shown(number: float) -> str:
    return f"{number:g}" if abs(number) < 1e6 or not math.isfinite(number) else f"{number:.0f}"


def _parameter(
    default: Any,
    help: str,
    low: float = -math.inf,
    high: float = math.inf,
    *,
    workers_check: bool = False,
    **more: Any,
) -> Any:
    bounds = {"low": low, "high": high} if workers_check else {}
    on_wire = wire(name=more.get("names", {}).get("grpc", ""), **bounds)
    metadata = {"of_request": (default, help, low, high, more), **on_wire}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


_drawn = partial(_parameter, workers_check=True)


def _not_in(*dialects: str) -> dict[str, str]:
    return dict.fromkeys(dialects, "")


_OPENAI_ALONE = _not_in("responses", "anthropic", "ollama", "pooling")
_NOT_ANTHROPIC = _not_in("anthropic", "pooling")
_TEXT = _not_in("pooling")
_CHATS = _not_in("anthropic", "ollama", "pooling")
_BY_CALL = {**_OPENAI_ALONE, "grpc": ""}
_TRAINERS = ("sglang", "vllm")
"""Bodies of tokens in and tokens out, which have parameters of sampling in a field of their own."""
_BY_TRAINER = {**_BY_CALL, **_not_in(*_TRAINERS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of drawing the next token."""

    temperature: float = _drawn(1.0, "0 = greedy", 0, 100, of_model=True, names=_TEXT)
    top_p: float = _drawn(
        1.0,
        "probability mass kept (nucleus)",
        0,
        1,
        excludes_low=True,
        of_model=True,
        names=_TEXT,
    )
    top_k: int = _drawn(
        0,
        "number of most likely tokens to draw from; 0 or -1 = all",
        0,
        2**31 - 1,
        of_model=True,
        names=_TEXT,
        aliases={-1: 0},
    )
    min_p: float = _drawn(
        0.0,
        "tokens below this share of the largest probability are dropped",
        0,
        1,
        of_model=True,
        names=_NOT_ANTHROPIC,
    )
    top_n_sigma: float = _drawn(
        0.0,
        "tokens whose logit is more than so many standard deviations of all logits below the "
        "largest are dropped; 0 or -1 = off",
        0,
        100,
        names=_NOT_ANTHROPIC,
        aliases={-1: 0},
    )
    repetition_penalty: float = _drawn(
        1.0,
        "divides positive and multiplies negative logits of tokens that occurred",
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
        of_model=True,
        names={**_NOT_ANTHROPIC, "ollama": "repeat_penalty"},
    )
    presence_penalty: float = _drawn(
        0.0, "subtracted from logits of generated tokens", -2, 2, names=_NOT_ANTHROPIC
    )
    frequency_penalty: float = _drawn(
        0.0, "subtracted for each time that a token was generated", -2, 2, names=_NOT_ANTHROPIC
    )
    logit_bias: dict[int, float] = _drawn(  # noqa: RUF009  It makes a field.
        {},
        "token id -> number that is added to the token's logit",
        -MAX_BIAS,
        MAX_BIAS,
        max_entries=1024,
        names=_CHATS,
    )
    seed: int = _drawn(
        0,
        "64-bit; same seed, same text; -1 = random",
        -(2**63),
        2**64 - 1,
        says_more=False,
        names={**_TEXT, "sglang": "sampling_seed"},
        aliases={-1: None},
    )
    """Unsigned 64 bits here; noise is a function of (seed, absolute position, token id)."""
    n: int = _drawn(1, "samples of each prompt", 1, 128, names=_OPENAI_ALONE)
    constraint: Constraint | None = None
    time_tokens: TimeTokens | None = None
    beams: BeamParams | None = None
    speculates: bool = _parameter(
        True,
        "tokens may be drafted where that pays; the text is the same",
        names={**_OPENAI_ALONE, **dict.fromkeys(("openai", "grpc", *_TRAINERS), "speculate")},
    )

    @property
    def counts_tokens(self) -> bool:
        """Whether the logits depend on the tokens so far, beside constraints."""
        return self.has_penalties or self.time_tokens is not None

    @property
    def not_beside_beams(self) -> str:
        """What a beam search has no place for; empty: nothing."""
        wrong = {
            "a temperature above 0": self.temperature > 0,
            "n above 1": self.n > 1,
            "penalties": self.has_penalties,
            "a constraint": self.constraint is not None,
        }
        return next((name for name, is_given in wrong.items() if is_given), "")

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that have occurred get other logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """Conditions that end a sample. Engines know tokens alone; the gateway finds texts."""

    max_tokens: int | None = _parameter(
        None,
        "most tokens generated of each sample; absent: up to the context",
        1,
        MAX_TOKENS,
        names={
            "responses": "max_output_tokens",
            "ollama": "num_predict",
            "pooling": "",
            "sglang": "max_new_tokens",
        },
    )
    min_tokens: int = _parameter(
        0,
        "no stop before so many tokens",
        0,
        MAX_TOKENS,
        names={**_CHATS, "sglang": "min_new_tokens"},
    )
    stop: tuple[str, ...] = _parameter(
        (),
        "strings that end the text",
        1,
        _MAX_STOP_BYTES,
        max_entries=_MAX_STOPS,
        names={"anthropic": "stop_sequences", "pooling": ""},
    )
    stop_regex: tuple[str, ...] = _parameter(
        (),
        "regular expressions that end the text where a match is complete",
        1,
        _MAX_STOP_BYTES,
        max_entries=_MAX_STOPS,
        names=_CHATS,
    )
    stop_token_ids: tuple[int, ...] = _parameter(
        (), "tokens that end the text", max_entries=256, names=_OPENAI_ALONE
    )
    ignore_eos: bool = _parameter(False, "go on past the end-of-sequence token", names=_CHATS)
    include_stop_in_output: bool = _parameter(
        False,
        "keep the stop's text",
        names={
            **_OPENAI_ALONE,
            "openai": "include_stop_str_in_output",
            "vllm": "include_stop_str_in_output",
            "sglang": "no_stop_trim",
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallParams:
    """Parameters of a request that change neither how tokens are drawn nor where a sample ends."""

    top_logprobs: int | None = _parameter(
        None,
        "alternatives per position",
        0,
        MAX_TOP_LOGPROBS,
        names={
            **_not_in("openai", "anthropic", "pooling", "grpc", "vllm"),
            "sglang": "top_logprobs_num",
        },
    )
    """None: no log-probabilities. OpenAI's two bodies have separate fields for it."""
    prompt_logprobs: int | None = _parameter(
        None,
        "log-probabilities of the prompt's tokens: alternatives per position; only with n: 1, not "
        "streamed",
        0,
        MAX_TOP_LOGPROBS,
        names=_BY_TRAINER,
    )
    logprobs_mode: str = _parameter(
        "raw_logprobs",
        "of which distribution log-probabilities of generated tokens are: the model's, or the same "
        "with its logits divided by the temperature (if that is not 0). Filters, penalties and "
        "biases never count, nor does this for a prompt's tokens",
        choices=("raw_logprobs", "processed_logprobs"),
        names=_BY_CALL,
    )
    skip_special_tokens: bool = _parameter(
        True, "leave special tokens out of the text", names=_BY_TRAINER
    )
    cache_salt: str = _parameter("", "separates cache entries", 1, MAX_SALT_BYTES)
    priority: int = _parameter(
        0,
        "less is more urgent, where workers run with the scheduling policy `priority`",
        -MAX_PRIORITY,
        MAX_PRIORITY,
    )
    routing_key: str = _parameter(
        "",
        "keeps requests of one key on one worker, if so set up",
        0,
        256,
        names={**_not_in("anthropic", "ollama", "pooling"), "grpc": ""},
    )
    session_id: str = _parameter(
        "",
        "names the chat: its KV stays on its worker between requests while there is room. The "
        "routing key as well, where none is given",
        0,
        MAX_SESSION_ID_BYTES,
    )
    end_session: bool = _parameter(
        False, "the chat is over with this request: nothing is kept for it"
    )
    ttft_target_ms: float | None = _parameter(
        None,
        "from arrival to the first token, in milliseconds; refused at once when it would come "
        "later; default the tenant's",
        1,
        _MAX_TARGET_MS,
        names=_BY_CALL,
    )
    itl_target_ms: float | None = _parameter(
        None,
        "mean time between tokens, in milliseconds; default the tenant's",
        1,
        _MAX_TARGET_MS,
        names=_BY_CALL,
    )
    timeout: float | None = _parameter(
        None,
        "longest duration of the request, in seconds; the server's own limit applies as well",
        0,
        excludes_low=True,
        names={**_BY_CALL, "pooling": "timeout"},
    )
    ttft_timeout: float | None = _parameter(
        None,
        "longest time until the first token, waiting included, in seconds",
        0,
        excludes_low=True,
        names=_BY_CALL,
    )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities of one token, before filters, and before temperature unless the
    request's `logprobs_mode` says otherwise.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), most likely first."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive tokens of a prompt."""

    request_id: str
    attempt: int
    first_position: int
    """Position in the prompt of the first of these tokens; position 0 has no log-probability."""
    logprobs: list[TokenLogprob]


def _declared(cls: type) -> dict[str, Parameter]:
    return {
        one.name: Parameter(one.name, one.type.removesuffix(" | None"), *given[:4], **given[4])  # type: ignore[arg-type]
        for one in fields(cls)
        if (given := one.metadata.get("of_request")) is not None
    }


PARAMETERS: Mapping[str, Parameter] = {
    **_declared(SamplingParams),
    **_declared(StopCriteria),
    **_declared(CallParams),
}
"""Every parameter that requests give, by its name in the classes above."""
SAMPLING_NUMBERS: Mapping[str, Parameter] = {
    name: one for name, one in _declared(SamplingParams).items() if one.type in ("float", "int")
}
SAMPLING_DEFAULTS: Mapping[str, float] = {
    name: one.default for name, one in PARAMETERS.items() if one.of_model
}
"""Values of the parameters of which a model may have its own default, where it has none."""
