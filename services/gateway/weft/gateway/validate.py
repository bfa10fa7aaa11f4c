"""Checks common to all dialects. Nothing unvalidated goes further."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from weft.contract.errors import InvalidRequest
from weft.contract.request import (
    MAX_CONSTRAINT_BYTES,
    MAX_MARK_TOKENS,
    PARAMETERS,
    Constraint,
    Parameter,
    check_whitespace,
)
from weft.contract.token_ids import are_below
from weft.gateway.request import GenerateRequest, PreparedPrompt
from weft.gateway.text.stop_patterns import PatternError, stop_patterns

MAX_REGEX_STATES = 2048
MAX_MESSAGES = 1024
MAX_CHOICES = 4096
MAX_TOOLS = 128
MAX_INPUTS = 2048
"""Most inputs of a request for vectors, as OpenAI's API."""
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities of the tokens of a request's prompts, alternatives included."""
_MAX_DIGITS = 40
"""Most digits shown of a number."""
_ENTRIES = {"stop": "stop string", "stop_regex": "expression"}
"""What an entry of a list of texts is, for error messages."""


def check_parameters(
    given: Mapping[str, Any], names: Mapping[str, str], vocabulary_size: int
) -> None:
    """Checks parameters, by their names in `PARAMETERS`, against their declarations. `names` are
    the client's where they differ. Raises InvalidRequest, whose `param` is the client's name.
    """
    for name, value in given.items():
        one, param = PARAMETERS[name], names.get(name, name)
        if one.type in ("float", "int"):
            _check_number(param, value, one)
        elif one.choices:
            if value not in one.choices:
                raise invalid(param, f"must be {' or '.join(one.choices)}")
        elif one.type == "str":
            check_text(param, value, one)
        elif one.type == "tuple[str, ...]":
            _check_texts(param, value, one)
        elif one.type != "bool":
            if len(value) > one.max_entries:
                raise invalid(param, f"at most {one.max_entries} entries")
            for number in value.values() if isinstance(value, Mapping) else ():
                _check_number(param, number, one)
            check_ids(param, value, vocabulary_size)


def _check_number(param: str, value: float, one: Parameter) -> None:
    check_range(param, value, one.low, one.high, above=one.excludes_low)


def check_text(param: str, value: str, one: Parameter) -> None:
    if one.low and not value:
        raise invalid(param, "is empty; leave it out, or give at least one character")
    if len(value.encode()) > one.high:
        raise invalid(param, f"at most {one.high} bytes")


def _check_texts(param: str, texts: Sequence[str], one: Parameter) -> None:
    entry = _ENTRIES.get(one.name, "text")
    if len(texts) > one.max_entries:
        raise invalid(param, f"{len(texts)} {entry}s; at most {one.max_entries}")
    for text in texts:
        if not text:
            raise invalid(param, f"one {entry} is empty")
        if len(text.encode()) > one.high:
            raise invalid(param, f"one {entry} is longer than {one.high} bytes")


def check_regexes(patterns: Sequence[str], num_samples: int, param: str) -> None:
    """Raises InvalidRequest for regular expressions that cannot be used, or have too many states
    over all samples: each new character of a sample may cost a look at every state.
    """
    try:
        num_states = stop_patterns(tuple(patterns)).num_states if patterns else 0
    except PatternError as error:
        raise invalid(param, f"cannot be used: {error}") from None
    if num_states * num_samples > MAX_REGEX_STATES:
        raise invalid(
            param,
            f"the expressions have {num_states} states for each of {num_samples} samples; at most "
            f"{MAX_REGEX_STATES} in all are accepted: shorten them, or ask for fewer samples",
        )


def check_not_streamed(param: str, is_streamed: bool) -> None:
    """Raises InvalidRequest if an answer with a prompt's log-probabilities is to be streamed."""
    if is_streamed:
        raise invalid(param, "log-probabilities of a prompt are not streamed; leave out stream")


def num_prompt_logprobs(request: GenerateRequest, prompts: Sequence[PreparedPrompt]) -> int:
    """Number of log-probabilities of prompts' tokens, all of which wait for the answer. Raises
    InvalidRequest if there are too many.
    """
    if request.prompt_logprobs is None:
        return 0
    num_tokens = sum(len(prompt.ids) for prompt in prompts)
    total = num_tokens * (1 + request.prompt_logprobs)
    if total > MAX_PROMPT_LOGPROBS:
        raise invalid(
            request.raw.name_of("prompt_logprobs"),
            f"{num_tokens} prompt tokens with {request.prompt_logprobs} alternatives have {total} "
            f"log-probabilities; at most {MAX_PROMPT_LOGPROBS} are returned",
        )
    return total


def check_constraint(constraint: Constraint, param: str) -> None:
    """Raises InvalidRequest for an empty constraint; its owner checks the content."""
    if constraint.kind == "choice":
        check_range(param, len(constraint.choices), 1, MAX_CHOICES, "choices")
        if not all(constraint.choices):
            raise invalid(param, "a choice is empty")
    elif not constraint.text:
        raise invalid(param, "is empty")
    if constraint.num_bytes > MAX_CONSTRAINT_BYTES:
        message = f"has {constraint.num_bytes} bytes; at most {MAX_CONSTRAINT_BYTES} are accepted"
        raise invalid(param, message)
    if constraint.whitespace:
        try:
            check_whitespace(constraint.whitespace)
        except ValueError as error:
            raise invalid(f"{param}.whitespace_pattern", str(error)) from None


def check_marks(constraint: Constraint, param: str, vocabulary_size: int) -> None:
    """Raises InvalidRequest if a constraint's alternative tokens are not valid or too many."""
    check_range(f"{param}.alternatives", len(constraint.alternatives), 0, MAX_MARK_TOKENS, "tokens")
    check_ids(f"{param}.alternatives", constraint.alternatives, vocabulary_size)
    if (reasoning := constraint.reasoning) is None:
        return
    check_range(f"{param}.reasoning.end", len(reasoning.end), 1, MAX_MARK_TOKENS, "tokens")
    marks = (*reasoning.end, reasoning.begin, reasoning.until)
    given = [mark for mark in marks if mark is not None]
    check_ids(f"{param}.reasoning", given, vocabulary_size)


def check_ids(param: str, ids: Collection[int], vocabulary_size: int) -> None:
    """Raises InvalidRequest when a token id is outside the vocabulary."""
    if not ids or are_below(ids, vocabulary_size):
        return
    for token_id in (min(ids), max(ids)):
        if not 0 <= token_id < vocabulary_size:
            raise invalid(
                param, f"token id {token_id} is outside the vocabulary (0 to {vocabulary_size - 1})"
            )


def check_range(
    param: str, value: float, low: float, high: float, unit: str = "", *, above: bool = False
) -> None:
    """Raises InvalidRequest unless low <= value <= high (low < value with `above`)."""
    # Comparisons with NaN are false.
    is_inside = low < value <= high if above else low <= value <= high
    if not is_inside:
        words = ("above", "and at most") if above else ("from", "to")
        bound = f"{words[0]} {_shown(low)}"
        if high != math.inf:
            bound += f" {words[1]} {_shown(high)}"
        raise invalid(param, f"must be {bound}{' ' + unit if unit else ''}, not {_shown(value)}")


def _shown(number: float) -> str:
    if not isinstance(number, int):
        return f"{number:.15g}"
    digits = str(number)
    return digits if len(digits) <= _MAX_DIGITS else digits[:_MAX_DIGITS] + "..."


def invalid(param: str, message: str) -> InvalidRequest:
    """The error for one invalid field."""
    return InvalidRequest(f"{param}: {message}", stage="validate", param=param)


def unsupported(param: str, what: str) -> InvalidRequest:
    """The error for a field that asks for `what`, which this server does not serve."""
    return invalid(param, f"not supported by this server ({what}); leave it out")
