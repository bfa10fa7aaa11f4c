"""Conversion of bodies of tokens in and tokens out to the gateway's own request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.contract.request import MAX_TOKENS, CallParams, Constraint
from weft.gateway.api.answer import field_names
from weft.gateway.api.call import check_client_id
from weft.gateway.api.openai.constrain import GivenConstraint, structured_constraint
from weft.gateway.api.parameters import client_names, given_parameters, settle_logprobs
from weft.gateway.api.trainer.token_bodies import (
    OF_PARAMS,
    ContinueTokensBody,
    GenerateTokensBody,
    SglangParams,
)
from weft.gateway.request import CallFacts, Prompt, RawRequest, TextPrompt, TokenPrompt
from weft.gateway.validate import check_not_streamed, check_range, invalid

_PREFIX, _STRUCTURED = "sampling_params.", "structured_outputs"
_SGLANG_TOKENS, _VLLM_TOKENS = 128, 16
"""Defaults of `max_tokens`, which clients of the two rely on."""
_KINDS: Mapping[str, Any] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "structural_tag",
}


def _names(dialect: str, more: Mapping[str, str]) -> Mapping[str, str]:
    own = client_names(dialect, _PREFIX, OF_PARAMS)
    return {**own, **client_names(dialect, "", (CallParams,)), **more}


SGLANG_NAMES = _names(
    "sglang",
    {
        "prompt_logprobs": "logprob_start_len",
        "skip_special_tokens": f"{_PREFIX}skip_special_tokens",
    },
)
VLLM_NAMES = _names(
    "vllm",
    {"top_logprobs": f"{_PREFIX}logprobs", "prompt_logprobs": f"{_PREFIX}prompt_logprobs"},
)


def is_list(body: GenerateTokensBody) -> bool:
    """Whether the answer is a list, with an entry for each sample."""
    params = body.sampling_params
    n = 1 if params is None else getattr(params, "n", None) or 1
    given = body.input_ids if body.text is None else body.text
    return n > 1 or (isinstance(given, list) and not isinstance(given[0] if given else 0, int))


def generate_request(body: GenerateTokensBody, facts: CallFacts) -> RawRequest:
    """Translates a body of SGLang. Raises InvalidRequest if it asks for what is not supported, or
    fields contradict each other.
    """
    params = body.sampling_params or SglangParams.model_validate({})
    given = {
        "max_tokens": _SGLANG_TOKENS,
        **given_parameters(params, "sglang", OF_PARAMS),
        **given_parameters(body, "sglang", (CallParams,)),
    }
    if params.skip_special_tokens is not None:
        given["skip_special_tokens"] = params.skip_special_tokens
    if given.get("top_logprobs") and not body.return_logprob:
        raise invalid("top_logprobs_num", "needs return_logprob: true")
    settle_logprobs(given, "", is_wanted=bool(body.return_logprob))
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if start < -1:
        raise invalid("logprob_start_len", "must be a position, or -1")
    if start >= 0 and body.return_logprob:
        check_not_streamed("logprob_start_len", bool(body.stream))
        given["prompt_logprobs"] = given["top_logprobs"]
    prompts = _prompts(body)
    routes_from = None
    if body.return_routed_experts:
        routes_from = _routes_from("routed_experts_start_len", body.routed_experts_start_len)
    rid = body.rid
    if isinstance(rid, list) and len(rid) != len(prompts):
        raise invalid("rid", f"{len(rid)} names for {len(prompts)} prompts")
    if isinstance(rid, str):
        check_client_id("rid", rid)
    constraint = _constraint(params)
    names = dict(SGLANG_NAMES)
    if constraint is not None:
        names["constraint"] = constraint.param
    return RawRequest(
        call=facts,
        own_id=rid if isinstance(rid, str) else "",
        model=body.named_model,
        prompts=prompts,
        given=given,
        names=names,
        constraint=None if constraint is None else constraint.value,
        routes_from=routes_from,
    )


def _routes_from(name: str, given: int | None) -> int:
    start = given or 0
    check_range(name, start, 0, MAX_TOKENS)
    return start


def _prompts(body: GenerateTokensBody) -> tuple[Prompt, ...]:
    if (body.text is None) == (body.input_ids is None):
        raise invalid("input_ids", "give either it or text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        return tuple(TextPrompt(text=text) for text in texts)
    lists: Any = body.input_ids
    if not lists or isinstance(lists[0], int):
        lists = [lists]
    return tuple(TokenPrompt(ids=tuple(ids)) for ids in lists)


def _constraint(params: SglangParams) -> GivenConstraint | None:
    given = [
        GivenConstraint(f"{_PREFIX}{name}", Constraint(kind=kind, text=text))
        for name, kind in _KINDS.items()
        if (text := getattr(params, name)) is not None
    ]
    if len(given) > 1:
        raise invalid(given[1].param, f"contradicts {given[0].param}: give one constraint")
    return given[0] if given else None


def continue_request(body: ContinueTokensBody, facts: CallFacts) -> RawRequest:
    """Translates a body of vLLM; errors as in `generate_request`."""
    params = body.sampling_params
    given = {
        "max_tokens": _VLLM_TOKENS,
        **given_parameters(params, "vllm", OF_PARAMS),
        **given_parameters(body, "vllm", (CallParams,)),
    }
    if params.logprobs is not None:
        given["top_logprobs"] = params.logprobs
    if params.prompt_logprobs is not None:
        check_not_streamed(f"{_PREFIX}prompt_logprobs", bool(body.stream))
        given["prompt_logprobs"] = params.prompt_logprobs
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "needs stream: true")
    start, routes_from = body.routed_experts_prompt_start, None
    if body.return_routed_experts or (body.return_routed_experts is None and start is not None):
        routes_from = _routes_from("routed_experts_prompt_start", start)
    if body.request_id:
        check_client_id("request_id", body.request_id)
    names, constraint = dict(VLLM_NAMES), None
    if params.structured_outputs is not None:
        with field_names({}, {_STRUCTURED: f"{_PREFIX}{_STRUCTURED}"}):
            found = structured_constraint(params.structured_outputs)
        if found is not None:
            names["constraint"], constraint = f"{_PREFIX}{found.param}", found.value
    return RawRequest(
        call=facts,
        own_id=body.request_id or "",
        model=body.model or "",
        prompts=(TokenPrompt(ids=tuple(body.token_ids)),),
        given=given,
        names=names,
        constraint=constraint,
        routes_from=routes_from,
    )
