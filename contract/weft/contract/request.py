"""The parameters of a request: plain values, validated at the services' edges."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters of drawing the next token; ranges as in protos/weft/v1/common.proto."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of most likely tokens to draw from; 0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    """Unsigned 64 bits; noise is a function of (seed, absolute position, token id)."""
    n: int = 1
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
