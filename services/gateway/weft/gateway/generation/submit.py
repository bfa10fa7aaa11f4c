"""Builds the Submit of one attempt, split so that no Session message is too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weft.contract.codec.pairs import POOL, SAMPLING, SPAN
from weft.contract.codec.walk import duration
from weft.contract.tasks import PoolingParams
from weft.gateway.request import GenerateRequest, PoolingOptions, PreparedPrompt
from weft.v1 import common_pb2, decode_pb2

_MAX_TOKENS_PER_MESSAGE = 32_768
"""Most tokens per message, of at most 5 bytes each: well under the 256 KiB of a Session message."""


def submit_messages(
    request: GenerateRequest,
    prompt: PreparedPrompt,
    *,
    model: str,
    wire_id: str,
    attempt: int,
    stop_ids: Sequence[int],
    candidates: Sequence[decode_pb2.PrefillCandidate],
    time_left_s: float,
    first_token_left_s: float,
    traceparent: str,
    samples: Sequence[Sequence[int] | None] = (),
    prompt_logprobs: int | None = None,
) -> list[decode_pb2.SessionRequest]:
    """Builds the messages of one attempt to run one prompt of a request.

    Args:
        model: Name that the worker knows.
        wire_id: Key of the prompt on the Session, together with `attempt`.
        attempt: From 1.
        stop_ids: All tokens that end a sample, the model's own included.
        candidates: Prefill workers, best first.
        time_left_s: Seconds until the request's deadline.
        first_token_left_s: Seconds until the prompt must have its first token.
        traceparent: Names the attempt's span; empty: none.
        samples: Tokens of earlier attempts by sample; None where the client has its whole answer.
        prompt_logprobs: Alternatives wanted at each position of the prompt; None: the prompt is not
            scored.
    """
    stop = request.stop
    first, rest = prompt.ids[:_MAX_TOKENS_PER_MESSAGE], prompt.ids[_MAX_TOKENS_PER_MESSAGE:]
    submit_message = decode_pb2.SessionRequest(
        submit=decode_pb2.Submit(
            request_id=wire_id,
            attempt=attempt,
            prompt_length=len(prompt.ids),
            sampling=sampling_to_proto(request, prompt),
            stop=common_pb2.StopCriteria(
                max_tokens=prompt.max_tokens,
                min_tokens=stop.min_tokens,
                stop_token_ids=stop_ids,
                ignore_eos=stop.ignore_eos,
            ),
            prefill_candidates=candidates,
            first_token_timeout=duration(max(0.0, min(time_left_s, first_token_left_s))),
            total_timeout=duration(max(0.0, time_left_s)),
            traceparent=traceparent,
            cache_salt=request.cache_salt,
            priority=request.priority,
            tenant=request.tenant_name,
            model=model,
            session_id=request.session_id,
            end_session=request.end_session,
            spans=map(SPAN.encode, prompt.spans),
        )
    )
    submit = submit_message.submit
    # Tokens are set in place: a copy of a message takes as long as parsing it.
    submit.prompt.ids.extend(first)
    if request.adapter is not None:
        submit.adapter.name, submit.adapter.digest = request.adapter.name, request.adapter.digest
    if request.top_logprobs is not None:
        submit.logprobs.top_logprobs = request.top_logprobs
        submit.logprobs.scaled = request.logprobs_mode == "processed_logprobs"
        # A message field that equals its default must still be there.
        submit.logprobs.SetInParent()
    if prompt_logprobs is not None:
        submit.prompt_logprobs.top_logprobs = prompt_logprobs
        submit.prompt_logprobs.SetInParent()
    if request.raw.routes_from is not None:
        submit.routes_from = request.raw.routes_from
    if request.pooling is not None:
        submit.pool.CopyFrom(_pool(request.pooling, prompt))
    generated_parts = _add_progress(submit, samples, _MAX_TOKENS_PER_MESSAGE - len(first))
    messages = [submit_message]
    for start in range(0, len(rest), _MAX_TOKENS_PER_MESSAGE):
        messages.append(decode_pb2.SessionRequest())
        part = messages[-1].prompt_part
        part.request_id, part.attempt = wire_id, attempt
        part.tokens.ids.extend(rest[start : start + _MAX_TOKENS_PER_MESSAGE])
    return messages + generated_parts


def _pool(pooling: PoolingOptions, prompt: PreparedPrompt) -> decode_pb2.PoolOptions:
    return POOL.encode(
        PoolingParams(
            output=pooling.output,
            label_ids=pooling.label_ids,
            dimensions=pooling.dimensions,
            normalises=pooling.normalises,
            segment_start=prompt.segment_start,
            aligned_from=pooling.aligned_from,
            num_frames=pooling.num_frames,
        )
    )


def sampling_to_proto(
    request: GenerateRequest, prompt: PreparedPrompt
) -> common_pb2.SamplingParams:
    return SAMPLING.encode(
        replace(request.sampling, seed=prompt.seed, constraint=prompt.constraint)
    )


def _add_progress(
    submit: decode_pb2.Submit, samples: Sequence[Sequence[int] | None], room: int
) -> list[decode_pb2.SessionRequest]:
    """Adds as many tokens of earlier attempts to `submit` as it has room for; returns messages with
    the rest.
    """
    messages: list[decode_pb2.SessionRequest] = []
    for number, ids in enumerate(samples):
        if ids is None:
            submit.progress.add(sample=number, finished=True)
            continue
        if not ids:
            continue
        tokens = common_pb2.TokenIds(ids=ids[:room])
        submit.progress.add(sample=number, num_tokens=len(ids), tokens=tokens)
        for start in range(len(tokens.ids), len(ids), _MAX_TOKENS_PER_MESSAGE):
            part = decode_pb2.GeneratedPart(
                request_id=submit.request_id,
                attempt=submit.attempt,
                sample=number,
                tokens=common_pb2.TokenIds(ids=ids[start : start + _MAX_TOKENS_PER_MESSAGE]),
            )
            messages.append(decode_pb2.SessionRequest(generated_part=part))
        room -= len(tokens.ids)
    return messages
