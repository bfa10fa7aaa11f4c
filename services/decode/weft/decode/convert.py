"""Conversion of submits from protobuf to plain values, validated on arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from weft.contract.errors import InvalidRequest
from weft.contract.handle import ADAPTER_DIGEST_BYTES
from weft.contract.request import (
    MAX_BIAS,
    MAX_MARK_TOKENS,
    MAX_PRIORITY,
    MAX_SESSION_ID_BYTES,
    MAX_TENANT_BYTES,
    MAX_TOP_LOGPROBS,
    SAMPLING_NUMBERS,
    Constraint,
    Reasoning,
    SamplingParams,
    StopCriteria,
    check_whitespace,
)
from weft.contract.submits import SampleProgress, Submit
from weft.contract.tasks import Output, PoolingParams
from weft.contract.timeline import FillCandidate
from weft.decode.assembly import Assembly
from weft.v1 import common_pb2, decode_pb2

MAX_ID_BYTES = 64
MAX_CANDIDATES = 64
MAX_TIMEOUT_S = 86_400.0
OUTPUTS: Mapping[decode_pb2.PoolOutput.ValueType, Output] = {
    decode_pb2.POOL_OUTPUT_EMBEDDING: "embedding",
    decode_pb2.POOL_OUTPUT_TOKEN_EMBEDDINGS: "token_embeddings",
    decode_pb2.POOL_OUTPUT_SPARSE: "sparse",
    decode_pb2.POOL_OUTPUT_MULTI_VECTOR: "multi_vector",
    decode_pb2.POOL_OUTPUT_CLASSES: "classes",
    decode_pb2.POOL_OUTPUT_LABEL_LOGITS: "label_logits",
}


def submit_from_proto(assembly: Assembly, session: int) -> Submit:
    """Converts a submit from the wire, with everything that came in parts.

    Raises:
        InvalidRequest: a field is out of its range, which the gateway should have refused.
    """
    message = assembly.message
    if not 0 < len(message.request_id.encode()) <= MAX_ID_BYTES:
        raise InvalidRequest(f"request_id: 1 to {MAX_ID_BYTES} bytes", param="request_id")
    if len(message.prefill_candidates) > MAX_CANDIDATES:
        raise InvalidRequest(f"more than {MAX_CANDIDATES}", param="prefill_candidates")
    if len(message.cache_salt.encode()) > 128:
        raise InvalidRequest("more than 128 bytes", param="cache_salt")
    if abs(message.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"not within {MAX_PRIORITY} of 0", param="priority")
    if len(message.tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest(f"more than {MAX_TENANT_BYTES} bytes", param="tenant")
    if message.HasField("adapter") and len(message.adapter.digest) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequest(f"a digest has {ADAPTER_DIGEST_BYTES} bytes", param="adapter")
    if len(message.session_id.encode()) > MAX_SESSION_ID_BYTES:
        raise InvalidRequest(f"more than {MAX_SESSION_ID_BYTES} bytes", param="session_id")
    top_logprobs, prompt_logprobs = (
        _num_top(message, name) for name in ("logprobs", "prompt_logprobs")
    )
    return Submit(
        gateway=session,
        request_id=message.request_id,
        attempt=message.attempt,
        prompt=assembly.prompt,
        sampling=_sampling(message.sampling),
        stop=_stop(message.stop),
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        pool=_pool(message.pool) if message.HasField("pool") else None,
        candidates=[
            FillCandidate(
                worker_id=candidate.worker_id,
                address=candidate.address,
                epoch=candidate.epoch,
                match_tokens=candidate.match_tokens,
                queued_tokens=candidate.queued_tokens,
                tokens_per_second=max(0.0, candidate.tokens_per_second),
            )
            for candidate in message.prefill_candidates
        ],
        first_token_timeout_s=_timeout(message, "first_token_timeout"),
        total_timeout_s=_timeout(message, "total_timeout"),
        cache_salt=message.cache_salt,
        traceparent=message.traceparent,
        priority=message.priority,
        tenant=message.tenant,
        adapter=message.adapter.digest,
        session_id=message.session_id,
        ends_session=message.end_session,
        progress=[
            SampleProgress(
                sample=entry.sample,
                tokens=assembly.generated[entry.sample].tolist(),
                is_finished=entry.finished,
            )
            for entry in message.progress
        ],
    )


def _pool(message: decode_pb2.PoolOptions) -> PoolingParams:
    output = OUTPUTS.get(message.output)
    if output is None:
        raise InvalidRequest("no output is named", param="pool")
    return PoolingParams(
        output=output,
        label_ids=tuple(message.label_ids),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalises=message.normalize if message.HasField("normalize") else None,
        segment_start=message.segment_start,
    )


def _num_top(
    message: decode_pb2.Submit, name: Literal["logprobs", "prompt_logprobs"]
) -> int | None:
    """Number of alternatives in one of the submit's options; None if the option is absent."""
    if not message.HasField(name):
        return None
    num_top: int = getattr(message, name).top_logprobs
    if num_top > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"more than {MAX_TOP_LOGPROBS}", param=name)
    return num_top


def _timeout(message: decode_pb2.Submit, name: str) -> float:
    if not message.HasField(name):  # type: ignore[arg-type]
        return MAX_TIMEOUT_S
    seconds: float = getattr(message, name).ToNanoseconds() / 1e9
    return min(max(seconds, 0.0), MAX_TIMEOUT_S)


def _in_range(name: str, value: float, low: float, high: float) -> float:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} = {value}: must be {low} to {high}", param=name)
    return value


def _sampling(message: common_pb2.SamplingParams) -> SamplingParams:
    numbers: dict[str, Any] = {
        name: _in_range(name, getattr(message, name), one.low, one.high)
        for name, one in SAMPLING_NUMBERS.items()
        if message.HasField(name)  # type: ignore[arg-type]
    }
    bias = {int(token): value for token, value in message.logit_bias.items()}
    for value in bias.values():
        _in_range("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return SamplingParams(
        **numbers,
        logit_bias=bias,
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
        speculates=message.speculate or not message.HasField("speculate"),
    )


def _constraint(message: common_pb2.Constraint) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("no kind of constraint is set", param="constraint")
    reasoning, alternatives = _reasoning(message), tuple(message.alternatives)
    whitespace = message.whitespace_pattern if message.HasField("whitespace_pattern") else None
    if whitespace:
        try:
            check_whitespace(whitespace)
        except ValueError as error:
            raise InvalidRequest(f"whitespace_pattern {error}", param="constraint") from None
    if len(message.alternatives) > MAX_MARK_TOKENS:
        raise InvalidRequest(f"more than {MAX_MARK_TOKENS} alternatives", param="constraint")
    if kind == "choice":
        choices = tuple(message.choice.choices)
        return Constraint(
            kind=kind, choices=choices, reasoning=reasoning, alternatives=alternatives
        )
    return Constraint(
        kind=kind,
        text=getattr(message, kind),
        whitespace=whitespace,
        reasoning=reasoning,
        alternatives=alternatives,
    )


def _reasoning(message: common_pb2.Constraint) -> Reasoning | None:
    if not message.HasField("reasoning"):
        return None
    given = message.reasoning
    if not 1 <= len(given.end) <= MAX_MARK_TOKENS:
        raise InvalidRequest(
            f"the end of the reasoning has {len(given.end)} tokens, not 1 to {MAX_MARK_TOKENS}",
            param="constraint",
        )
    return Reasoning(
        begin=given.begin if given.HasField("begin") else None,
        end=tuple(given.end),
        until=given.until if given.HasField("until") else None,
    )


def _stop(message: common_pb2.StopCriteria) -> StopCriteria:
    return StopCriteria(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )
