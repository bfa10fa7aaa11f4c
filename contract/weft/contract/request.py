"""The parameters of a request: plain values, validated at the services' edges."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

MAX_TOP_LOGPROBS = 20
MIN_REPETITION_PENALTY = 1e-3
MAX_REPETITION_PENALTY = 100.0
"""Largest repetition penalty; logits are divided by the penalty and must stay finite."""
MAX_PRIORITY = 1_000_000
"""Priorities are -MAX_PRIORITY to MAX_PRIORITY; lower is more urgent."""
MAX_TENANT_BYTES = 64
MAX_SESSION_ID_BYTES = 128
"""Longest client-chosen name of a chat session, bytes."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The tokens that begin and end the reasoning at the start of a sample."""

    begin: int | None = None
    """Token that begins the reasoning if it is the sample's first token; None: the prompt has
    already begun it."""
    end: tuple[int, ...]
    """Sequence of tokens that ends the reasoning; not empty."""
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
    whitespace: str | None = None
    """Regular expression of the blanks that may stand between two tokens of JSON; empty: none may;
    None: the worker's own form.
    """
    reasoning: Reasoning | None = field(default=None, compare=False)
    """Reasoning that may precede the constrained text; None: none may. This field and
    `alternatives` take no part in comparisons, since they do not change the grammar.
    """
    alternatives: tuple[int, ...] = field(default=(), compare=False)
    """Tokens that may replace the constrained text; any text may follow such a token."""

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text and of all choices."""
        return len(self.text.encode()) + sum(len(choice.encode()) for choice in self.choices)


def check_whitespace(pattern: str) -> None:
    """Checks a pattern of `Constraint.whitespace`.

    Raises:
        ValueError: It may match other texts than blanks, tabs and line breaks, or is too long.
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


MAX_BIAS = 100.0
"""A value of `logit_bias` is -MAX_BIAS to MAX_BIAS."""


class Parameter(NamedTuple):
    """A number that requests give of how tokens are drawn: declared once, for every dialect, the
    validation, the documents and the wire.
    """

    name: str
    """Its name in OpenAI's dialect, in typed gRPC and in `SamplingParams`."""
    default: float
    help: str
    low: float
    high: float
    excludes_low: bool = False
    is_whole: bool = False
    of_model: bool = False
    """Whether a model's generation_config.json may give another default."""
    names: Mapping[str, str] = {}
    """Its name in dialects where that differs; empty where a dialect lacks it."""
    aliases: Mapping[float, float | None] = {}
    """Values that clients give for another value; None: for an absent one."""

    def name_in(self, dialect: str) -> str:
        """Its name in a dialect; empty: the dialect lacks it."""
        return self.names.get(dialect, self.name)

    @property
    def description(self) -> str:
        """What it does, its range and its default, for clients."""
        range_ = f"{'above ' if self.excludes_low else ''}{self.low:g} to {self.high:g}"
        shown = "" if self.is_whole and self.high >= 1 << 31 else f"; {range_}"
        default = "the model's" if self.of_model else f"{self.default:g}"
        return f"{self.help}{shown}" + ("" if self.name == "seed" else f"; default {default}")


def _parameter(default: float, help: str, low: float, high: float, **more: Any) -> Any:
    return field(default=default, metadata={"of_request": (default, help, low, high, more)})


_OPENAI_ALONE = {"responses": "", "anthropic": "", "ollama": ""}
_NOT_ANTHROPIC = {"anthropic": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of drawing the next token."""

    temperature: float = _parameter(1.0, "0 = greedy", 0, 100, of_model=True)
    top_p: float = _parameter(
        1.0, "probability mass kept (nucleus)", 0, 1, excludes_low=True, of_model=True
    )
    top_k: int = _parameter(
        0,
        "number of most likely tokens to draw from; 0 or -1 = all",
        0,
        2**31 - 1,
        is_whole=True,
        of_model=True,
        aliases={-1: 0},
    )
    min_p: float = _parameter(
        0.0,
        "tokens below this share of the largest probability are dropped",
        0,
        1,
        of_model=True,
        names=_NOT_ANTHROPIC,
    )
    top_n_sigma: float = _parameter(
        0.0,
        "tokens whose logit is more than so many standard deviations of all logits below the "
        "largest are dropped; 0 or -1 = off",
        0,
        100,
        names=_NOT_ANTHROPIC,
        aliases={-1: 0},
    )
    repetition_penalty: float = _parameter(
        1.0,
        "divides positive and multiplies negative logits of tokens that occurred",
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
        of_model=True,
        names={**_NOT_ANTHROPIC, "ollama": "repeat_penalty"},
    )
    presence_penalty: float = _parameter(
        0.0, "subtracted from logits of generated tokens", -2, 2, names=_NOT_ANTHROPIC
    )
    frequency_penalty: float = _parameter(
        0.0, "subtracted for each time that a token was generated", -2, 2, names=_NOT_ANTHROPIC
    )
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = _parameter(
        0,
        "64-bit; same seed, same text; -1 = random",
        -(2**63),
        2**64 - 1,
        is_whole=True,
        aliases={-1: None},
    )
    """Unsigned 64 bits here; noise is a function of (seed, absolute position, token id)."""
    n: int = _parameter(1, "samples of each prompt", 1, 128, is_whole=True, names=_OPENAI_ALONE)
    constraint: Constraint | None = None
    speculates: bool = True
    """Whether the engine may speculate where that pays; the text does not change."""

    @property
    def has_penalties(self) -> bool:
        """Whether the logits depend on the tokens so far."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCriteria:
    """Conditions on tokens that end a sample; the gateway handles stop strings."""

    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probabilities of one token, before temperature and filters."""

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


PARAMETERS: Mapping[str, Parameter] = {
    one.name: Parameter(one.name, *given[:4], **given[4])
    for one in fields(SamplingParams)
    if (given := one.metadata.get("of_request")) is not None
}
"""The numbers that requests give of sampling, by their names in `SamplingParams`."""
SAMPLING_DEFAULTS: Mapping[str, float] = {
    name: one.default for name, one in PARAMETERS.items() if one.of_model
}
"""Values of the parameters of which a model may have its own default, where it has none."""
