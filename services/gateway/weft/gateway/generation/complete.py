"""Makes the complete request of what a dialect has read."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from weft.contract.request import (
    PARAMETERS,
    SAMPLING_NUMBERS,
    CallParams,
    SamplingParams,
    StopCriteria,
)
from weft.contract.tasks import Task
from weft.gateway.admission.tenants import TenantTerms
from weft.gateway.request import (
    ChatPrompt,
    ClipPrompt,
    GenerateRequest,
    PoolingOptions,
    RawRequest,
    ResolvedAdapter,
    Targets,
    TokenPrompt,
)
from weft.gateway.text.answer.demand import warn_of_unknown
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.parts import without_unread
from weft.gateway.text.pooled_prompts import for_model
from weft.gateway.validate import (
    MAX_INPUTS,
    MAX_MESSAGES,
    check_constraint,
    check_ids,
    check_marks,
    check_parameters,
    check_range,
    check_regexes,
    invalid,
)

MAX_REQUEST_SAMPLES = 1024
"""Most samples of all prompts of a request, unless more prompts are allowed."""
_DEFAULTS = {name: one.default for name, one in PARAMETERS.items()}
_SEEDS = 2**64
_STOP_NAMES, _CALL_NAMES = (
    tuple(one.name for one in fields(cls)) for cls in (StopCriteria, CallParams)
)


def complete(
    raw: RawRequest,
    card: ModelCard,
    terms: TenantTerms,
    *,
    max_prompts: int,
    task: Task = "generate",
    adapter: ResolvedAdapter | None = None,
) -> GenerateRequest:
    """Checks a raw request, and gives every parameter its value. `card` is of what serves it,
    `terms` are its tenant's. Raises InvalidRequest, whose `param` is the client's name of a field.
    """
    targets = _targets(raw)
    _check(raw, targets, card, max_prompts)
    values = {**_DEFAULTS, **card.sampling, **raw.given}
    prompts, pooling = raw.prompts, raw.pooling
    prompts = tuple(
        without_unread(prompt, card.unread, card.reads)
        if isinstance(prompt, ChatPrompt)
        else prompt
        for prompt in prompts
    )
    if pooling is not None or task != "generate":
        prompts, pooling = for_model(prompts, pooling, card, task)
    values |= {
        "routing_key": values["routing_key"] or raw.call.routing_key or values["session_id"],
        "timeout": raw.timeout_s,
        "ttft_timeout": raw.first_token_timeout_s,
    }
    if (tenant := raw.call.tenant) is not None:
        values |= {
            "cache_salt": tenant.salt(values["cache_salt"]),
            "session_id": tenant.session(values["session_id"]),
        }
    given_seed = raw.given.get("seed")
    seeds = tuple(
        secrets.randbits(64) if given_seed is None else int(given_seed) % _SEEDS for _ in prompts
    )
    return GenerateRequest(
        raw=raw,
        prompts=prompts,
        sampling=_sampling(raw, {**values, "seed": seeds[0]}),
        stop=StopCriteria(**{name: values[name] for name in _STOP_NAMES}),
        seeds=seeds,
        targets=targets.over(terms.targets),
        pooling=pooling,
        adapter=adapter,
        **{name: values[name] for name in _CALL_NAMES},
    )


def _sampling(raw: RawRequest, values: Mapping[str, Any]) -> SamplingParams:
    return SamplingParams(
        **{name: values[name] for name in SAMPLING_NUMBERS},
        logit_bias=values["logit_bias"],
        constraint=raw.constraint,
        time_tokens=raw.time_tokens,
        beams=raw.beams,
        speculates=values["speculates"],
    )


def _targets(raw: RawRequest) -> Targets:
    first, between = raw.given.get("ttft_target_ms"), raw.given.get("itl_target_ms")
    own = Targets(
        None if first is None else first / 1e3, None if between is None else between / 1e3
    )
    return own.over(raw.call.targets)


def _check(raw: RawRequest, targets: Targets, card: ModelCard, max_prompts: int) -> None:
    given = raw.given
    of_call = {
        "timeout": raw.timeout_s,
        "ttft_timeout": raw.first_token_timeout_s,
        "ttft_target_ms": _in_ms(targets.first_token_s),
        "itl_target_ms": _in_ms(targets.between_tokens_s),
    }
    wanted = {name: value for name, value in of_call.items() if value is not None}
    if "ttft_timeout" in wanted and raw.pooling is not None:
        raise invalid(
            "x-first-token-timeout-ms",
            "vectors and scores have no first token; limit the request by x-request-timeout-ms",
        )
    check_parameters({**given, **wanted}, raw.names, card.vocabulary_size)
    _check_together(raw)
    num_samples = given.get("n", 1) * len(raw.prompts)
    check_regexes(given.get("stop_regex", ()), num_samples, raw.name_of("stop_regex"))
    if (constraint := raw.constraint) is not None:
        param = raw.name_of("constraint")
        check_constraint(constraint, param)
        check_marks(constraint, param, card.vocabulary_size)
        warn_of_unknown(constraint, param)
    if raw.pooling is not None:
        _check_pooling(raw.pooling)
        max_prompts = max(max_prompts, MAX_INPUTS)
    _check_prompts(raw, card, max_prompts)


def _in_ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _check_together(raw: RawRequest) -> None:
    given, n = raw.given, raw.given.get("n", 1)
    least, most = given.get("min_tokens", 0), given.get("max_tokens")
    if most is not None and least > most:
        raise invalid(
            raw.name_of("min_tokens"),
            f"{least} is above {raw.name_of('max_tokens')}, which is {most}",
        )
    if given.get("prompt_logprobs") is not None and n != 1:
        param = raw.name_of("prompt_logprobs")
        raise invalid(param, f"log-probabilities of a prompt need n: 1, not {n}")
    if given.get("end_session") and not given.get("session_id"):
        raise invalid(
            raw.name_of("end_session"),
            f"needs a {raw.name_of('session_id')} that is not empty",
        )


def _check_pooling(pooling: PoolingOptions) -> None:
    most = PARAMETERS["max_tokens"].high
    if pooling.dimensions is not None:
        check_range("dimensions", pooling.dimensions, 1, most)
    if pooling.truncate_tokens is not None:
        check_range("truncate_prompt_tokens", pooling.truncate_tokens, 0, most)


def _check_prompts(raw: RawRequest, card: ModelCard, max_prompts: int) -> None:
    if not raw.prompts:
        raise invalid("prompt", "at least one prompt is needed")
    if len(raw.prompts) > max_prompts:
        raise invalid("prompt", f"{len(raw.prompts)} prompts; at most {max_prompts} at once")
    n, limit = raw.given.get("n", 1), max(max_prompts, MAX_REQUEST_SAMPLES)
    if n * len(raw.prompts) > limit:
        told = f"{n} for each of {len(raw.prompts)} prompts are too many; at most {limit} in all"
        raise invalid(raw.name_of("n"), told)
    for prompt in raw.prompts:
        if card.speech is not None and not isinstance(prompt, ClipPrompt):
            told = "transcribes speech; send files to /v1/audio/transcriptions"
            raise invalid("model", f"the model `{card.name}` {told}")
        if isinstance(prompt, ChatPrompt):
            if not prompt.messages:
                raise invalid("messages", "at least one message is needed")
            check_range("messages", len(prompt.messages), 1, MAX_MESSAGES, "messages")
            if card.template is None:
                raise invalid(
                    "messages",
                    f"the model `{card.name}` has no chat template; use completions instead",
                )
        elif isinstance(prompt, TokenPrompt):
            check_ids("prompt", prompt.ids, card.vocabulary_size)
