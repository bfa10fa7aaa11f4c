"""Validation common to both faces. Nothing unvalidated goes further."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from weft.contract.errors import InvalidRequest
from weft.contract.request import (
    MAX_BIAS,
    MAX_CONSTRAINT_BYTES,
    MAX_MARK_TOKENS,
    MAX_PRIORITY,
    MAX_SESSION_ID_BYTES,
    MAX_TOP_LOGPROBS,
    PARAMETERS,
    Constraint,
    check_whitespace,
)
from weft.contract.token_ids import are_below
from weft.gateway.request import (
    MAX_TARGET_S,
    MIN_TARGET_S,
    ChatPrompt,
    GenerateRequest,
    PreparedPrompt,
    Sampling,
    Stopping,
    Targets,
    TokenPrompt,
    Wants,
)
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.stop_patterns import PatternError, stop_patterns

MAX_REQUEST_SAMPLES = 1024
"""Most samples of all prompts of a request, unless more prompts are allowed."""
MAX_STOPS = 16
MAX_STOP_BYTES = 256
MAX_STOP_IDS = 256
MAX_REGEX_STATES = 2048
MAX_LOGIT_BIAS = 1024
MAX_MESSAGES = 1024
MAX_CHOICES = 4096
MAX_TOOLS = 128
MAX_SALT_BYTES = 128
MAX_INPUTS = 2048
"""Most inputs of a request for vectors, as OpenAI's API."""
MAX_ROUTING_KEY_BYTES = 256
MAX_PROMPT_LOGPROBS = 1 << 18
"""Most log-probabilities of the tokens of a request's prompts, alternatives included."""
MAX_TOKENS = 2**31 - 1
_MAX_DIGITS = 40
"""Most digits shown of a number."""


def check_request(request: GenerateRequest, model: ModelCard, max_prompts: int) -> None:
    """Checks everything that does not depend on tokens.

    Args:
        request: The request, as a face translated it.
        model: The request's model.
        max_prompts: Bound of prompts in one request.

    Raises:
        InvalidRequest: `param` names the field.
    """
    check_sampling(request.sampling, model.vocabulary_size)
    check_stopping(request.stopping, model.vocabulary_size, request.max_tokens_param)
    _check_regex_states(request)
    if (constraint := request.sampling.constraint) is not None:
        check_constraint(constraint, request.constraint_param)
        _check_marks(constraint, request.constraint_param, model.vocabulary_size)
    if request.top_logprobs is not None:
        check_range(request.top_logprobs_param, request.top_logprobs, 0, MAX_TOP_LOGPROBS)
    if request.prompt_logprobs is not None:
        _check_prompt_logprobs(request.prompt_logprobs, request)
    check_cache_salt(request.cache_salt)
    check_range("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_session_id(request.session_id)
    if request.ends_session and not request.session_id:
        raise invalid("end_session", "needs a session_id that is not empty")
    if len(request.routing_key.encode()) > MAX_ROUTING_KEY_BYTES:
        raise invalid("routing_key", f"at most {MAX_ROUTING_KEY_BYTES} bytes")
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise invalid("timeout", f"must be above 0 seconds, not {request.timeout_s:g}")
    first_s = request.first_token_timeout_s
    if first_s is not None and request.wants is not None:
        raise invalid(
            "x-first-token-timeout-ms",
            "vectors and scores have no first token; limit the request by x-request-timeout-ms",
        )
    if first_s is not None and not first_s > 0:
        raise invalid("ttft_timeout", f"must be above 0 seconds, not {first_s:g}")
    _check_targets(request.targets)
    if request.wants is not None:
        _check_wants(request.wants)
        max_prompts = max(max_prompts, MAX_INPUTS)
    _check_prompts(request, model, max_prompts)


def _check_wants(wants: Wants) -> None:
    if wants.dimensions is not None:
        check_range("dimensions", wants.dimensions, 1, MAX_TOKENS)
    if wants.truncate_tokens is not None:
        check_range("truncate_prompt_tokens", wants.truncate_tokens, 0, MAX_TOKENS)


def _check_prompt_logprobs(num_alternatives: int, request: GenerateRequest) -> None:
    param = request.prompt_logprobs_param
    check_range(param, num_alternatives, 0, MAX_TOP_LOGPROBS)
    if request.sampling.n != 1:
        raise invalid(param, f"log-probabilities of a prompt need n: 1, not {request.sampling.n}")


def check_not_streamed(param: str, is_streamed: bool) -> None:
    """Raises InvalidRequest if an answer with a prompt's log-probabilities is to be streamed."""
    if is_streamed:
        raise invalid(param, "log-probabilities of a prompt are not streamed; leave out stream")


def num_prompt_logprobs(request: GenerateRequest, prompts: Sequence[PreparedPrompt]) -> int:
    """Number of log-probabilities of prompts' tokens, all of which wait for the answer.

    Raises:
        InvalidRequest: There are too many.
    """
    if request.prompt_logprobs is None:
        return 0
    num_tokens = sum(len(prompt.ids) for prompt in prompts)
    total = num_tokens * (1 + request.prompt_logprobs)
    if total > MAX_PROMPT_LOGPROBS:
        raise invalid(
            request.prompt_logprobs_param,
            f"{num_tokens} prompt tokens with {request.prompt_logprobs} alternatives have {total} "
            f"log-probabilities; at most {MAX_PROMPT_LOGPROBS} are returned",
        )
    return total


def check_cache_salt(cache_salt: str) -> None:
    """Raises InvalidRequest for a salt that is too long."""
    if len(cache_salt.encode()) > MAX_SALT_BYTES:
        raise invalid("cache_salt", f"at most {MAX_SALT_BYTES} bytes")


def given_salt(cache_salt: str | None) -> str:
    """The salt of a JSON body; empty where it has none.

    Raises:
        InvalidRequest: The salt is empty, so it would not separate requests as its client wants.
    """
    if cache_salt == "":
        raise invalid("cache_salt", "is empty; leave it out, or give at least one character")
    return cache_salt or ""


def check_session_id(session_id: str) -> None:
    """Raises InvalidRequest for a session id that is too long."""
    if len(session_id.encode()) > MAX_SESSION_ID_BYTES:
        raise invalid("session_id", f"at most {MAX_SESSION_ID_BYTES} bytes")


def _check_targets(targets: Targets) -> None:
    named = (
        ("ttft_target_ms", targets.first_token_s),
        ("itl_target_ms", targets.between_tokens_s),
    )
    for name, target_s in named:
        if target_s is not None:
            check_range(name, target_s * 1e3, MIN_TARGET_S * 1e3, MAX_TARGET_S * 1e3, "ms")


def _check_prompts(request: GenerateRequest, model: ModelCard, max_prompts: int) -> None:
    if not request.prompts:
        raise invalid("prompt", "at least one prompt is needed")
    if len(request.prompts) > max_prompts:
        raise invalid("prompt", f"{len(request.prompts)} prompts; at most {max_prompts} at once")
    n, limit = request.sampling.n, max(max_prompts, MAX_REQUEST_SAMPLES)
    if n * len(request.prompts) > limit:
        told = (
            f"{n} for each of {len(request.prompts)} prompts are too many; at most {limit} in all"
        )
        raise invalid("n", told)
    for prompt in request.prompts:
        if isinstance(prompt, ChatPrompt):
            if not prompt.messages:
                raise invalid("messages", "at least one message is needed")
            check_range("messages", len(prompt.messages), 1, MAX_MESSAGES, "messages")
            if model.template is None:
                raise invalid(
                    "messages",
                    f"the model `{model.name}` has no chat template; use completions instead",
                )
        elif isinstance(prompt, TokenPrompt):
            check_ids("prompt", prompt.ids, model.vocabulary_size)


def check_sampling(sampling: Sampling, vocabulary_size: int) -> None:
    """Raises InvalidRequest for a sampling parameter out of its range."""
    for name, value in sampling.numbers.items():
        one = PARAMETERS[name]
        check_range(name, value, one.low, one.high, above=one.excludes_low)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
    for value in sampling.logit_bias.values():
        check_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    check_ids("logit_bias", sampling.logit_bias, vocabulary_size)


def check_stopping(
    stopping: Stopping, vocabulary_size: int, max_tokens_param: str = "max_tokens"
) -> None:
    """Raises InvalidRequest for a stop criterion out of its range."""
    if stopping.max_tokens is not None:
        check_range(max_tokens_param, stopping.max_tokens, 1, MAX_TOKENS)
    check_range("min_tokens", stopping.min_tokens, 0, MAX_TOKENS)
    if stopping.max_tokens is not None and stopping.min_tokens > stopping.max_tokens:
        raise invalid(
            "min_tokens",
            f"{stopping.min_tokens} is above {max_tokens_param}, which is {stopping.max_tokens}",
        )
    if len(stopping.stops) > MAX_STOPS:
        raise invalid("stop", f"{len(stopping.stops)} stop strings; at most {MAX_STOPS}")
    for stop in stopping.stops:
        if not stop:
            raise invalid("stop", "a stop string is empty")
        if len(stop.encode()) > MAX_STOP_BYTES:
            raise invalid("stop", f"a stop string is longer than {MAX_STOP_BYTES} bytes")
    _check_stop_regexes(stopping.stop_regexes)
    if len(stopping.stop_token_ids) > MAX_STOP_IDS:
        raise invalid("stop_token_ids", f"at most {MAX_STOP_IDS} ids")
    check_ids("stop_token_ids", stopping.stop_token_ids, vocabulary_size)


def _check_stop_regexes(patterns: tuple[str, ...]) -> None:
    if len(patterns) > MAX_STOPS:
        raise invalid("stop_regex", f"{len(patterns)} expressions; at most {MAX_STOPS}")
    for pattern in patterns:
        if not pattern:
            raise invalid("stop_regex", "an expression is empty")
        if len(pattern.encode()) > MAX_STOP_BYTES:
            raise invalid("stop_regex", f"an expression is longer than {MAX_STOP_BYTES} bytes")
    try:
        stop_patterns(patterns)
    except PatternError as error:
        raise invalid("stop_regex", f"cannot be used: {error}") from None


def _check_regex_states(request: GenerateRequest) -> None:
    """Bounds the states of `stop_regex` over all samples: each new character of a sample may cost a
    look at every state.
    """
    patterns = request.stopping.stop_regexes
    num_samples = request.sampling.n * len(request.prompts)
    num_states = stop_patterns(patterns).num_states if patterns else 0
    if num_states * num_samples > MAX_REGEX_STATES:
        raise invalid(
            "stop_regex",
            f"the expressions have {num_states} states for each of {num_samples} samples; at most "
            f"{MAX_REGEX_STATES} in all are accepted: shorten them, or ask for fewer samples",
        )


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


def _check_marks(constraint: Constraint, param: str, vocabulary_size: int) -> None:
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
    """Raises InvalidRequest when a token id is outside the vocabulary.

    Args:
        param: Field to name.
        ids: Token ids; may be empty.
        vocabulary_size: Ids are below it.
    """
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
        bound = f"{words[0]} {_shown(low)} {words[1]} {_shown(high)}"
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
    """The error for a field that asks for what there is not."""
    return invalid(param, f"not supported by this server ({what}); leave it out")
