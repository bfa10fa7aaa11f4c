"""The Session contract at the edge: protobuf to plain values and back, checked on the way in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from weft.common.durations import duration
from weft.common.errors import error_detail, grpc_code
from weft.common.worker.fills import TRANSPORTS
from weft.decode.assembly import Assembly
from weft.engine.errors import InvalidRequest, WeftError, error_class
from weft.engine.messages import (
    Failed,
    Finished,
    SampleProgress,
    SessionBatch,
    Submit,
    Tokens,
)
from weft.engine.request import (
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SESSION_ID_BYTES,
    MAX_TENANT_BYTES,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    Constraint,
    SamplingParams,
    StopCriteria,
    TokenLogprob,
)
from weft.engine.scheduler.state import FillCandidate, FillRecord, Timeline
from weft.engine.transfer.handle import ADAPTER_DIGEST_BYTES
from weft.v1 import common_pb2, decode_pb2

MAX_ID_BYTES = 64
MAX_CANDIDATES = 64
MAX_TIMEOUT_S = 86_400.0
MAX_EVENT_BYTES = 256 << 10
"""Bound of one SessionEvent."""
SOURCES = {
    "prefill": common_pb2.FILL_SOURCE_PREFILL,
    "kvstore": common_pb2.FILL_SOURCE_KVSTORE,
    "host": common_pb2.FILL_SOURCE_HOST,
    "disk": common_pb2.FILL_SOURCE_DISK,
}
REASONS = {
    "stop": common_pb2.FINISH_REASON_STOP,
    "length": common_pb2.FINISH_REASON_LENGTH,
    "cancelled": common_pb2.FINISH_REASON_CANCELLED,
}


def submit_from_proto(assembly: Assembly, session: int) -> Submit:
    """A submit from the wire, with everything that came in parts.

    Raises:
        InvalidRequest: a field is out of its range; the gateway should have said so.
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
    top_logprobs = message.logprobs.top_logprobs if message.HasField("logprobs") else None
    if top_logprobs is not None and top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(f"more than {MAX_TOP_LOGPROBS}", param="top_logprobs")
    return Submit(
        session=session,
        request_id=message.request_id,
        attempt=message.attempt,
        prompt=assembly.prompt,
        sampling=_sampling(message.sampling),
        stop=_stop(message.stop),
        top_logprobs=top_logprobs,
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
                tokens=assembly.generated[entry.sample],
                is_finished=entry.finished,
            )
            for entry in message.progress
        ],
    )


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
    def get(name: str, default: float, low: float, high: float) -> float:
        is_set = message.HasField(name)  # type: ignore[arg-type]
        return _in_range(name, getattr(message, name) if is_set else default, low, high)

    bias = {int(token): value for token, value in message.logit_bias.items()}
    for value in bias.values():
        _in_range("logit_bias", value, -100, 100)
    return SamplingParams(
        temperature=get("temperature", 1.0, 0, 100),
        top_p=get("top_p", 1.0, 0, 1),
        top_k=int(get("top_k", 0, 0, 2**31)),
        min_p=get("min_p", 0.0, 0, 1),
        repetition_penalty=get(
            "repetition_penalty", 1.0, MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY
        ),
        presence_penalty=get("presence_penalty", 0.0, -2, 2),
        frequency_penalty=get("frequency_penalty", 0.0, -2, 2),
        logit_bias=bias,
        seed=message.seed,
        n=int(get("n", 1, 1, 128)),
        constraint=_constraint(message.constraint) if message.HasField("constraint") else None,
        speculates=message.speculate or not message.HasField("speculate"),
    )


def _constraint(message: common_pb2.Constraint) -> Constraint:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("no kind of constraint is set", param="constraint")
    if kind == "choice":
        return Constraint(kind=kind, choices=tuple(message.choice.choices))
    return Constraint(kind=kind, text=getattr(message, kind))


def _stop(message: common_pb2.StopCriteria) -> StopCriteria:
    return StopCriteria(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def merge_batches(batches: Iterable[SessionBatch]) -> SessionBatch:
    """Everything not sent yet as one batch; consecutive tokens of a sample become one entry."""
    merged = SessionBatch(session=-1)
    last: dict[tuple[str, int, int], Tokens] = {}
    for batch in batches:
        merged.accepted += batch.accepted
        for tokens in batch.tokens:
            key = (tokens.request_id, tokens.attempt, tokens.sample)
            known = last.get(key)
            if known is not None and tokens.first_index == known.first_index + len(known.ids):
                known.ids.extend(tokens.ids)
                known.logprobs.extend(tokens.logprobs)
            else:
                last[key] = tokens
                merged.tokens.append(tokens)
        merged.preempted += batch.preempted
        merged.finished += batch.finished
        merged.failed += batch.failed
        merged.pongs += batch.pongs
    return merged


def batch_to_proto(
    batch: SessionBatch, worker_id: str, loop_age_s: float
) -> list[decode_pb2.SessionEvent]:
    """A batch as events below the size bound, token deltas first, ends last."""
    event = decode_pb2.SessionEvent()
    events = [event]
    size = 0
    for tokens in batch.tokens:
        # A log-probability entry is at most 20 alternatives of about 10 bytes.
        size += 48 + 5 * len(tokens.ids) + 260 * len(tokens.logprobs)
        if size > MAX_EVENT_BYTES:
            event, size = decode_pb2.SessionEvent(), 0
            events.append(event)
        _add_tokens(event, tokens)
    for accepted in batch.accepted:
        events[0].accepted.add(request_id=accepted.request_id, attempt=accepted.attempt)
    for preempted in batch.preempted:
        event.preempted.add(
            request_id=preempted.request_id, attempt=preempted.attempt, sample=preempted.sample
        )
    for finished in batch.finished:
        _add_finished(event, finished, worker_id)
    for failed in batch.failed:
        _add_failed(event, failed, worker_id)
    if batch.pongs:
        event.pong.nonce = batch.pongs[-1].nonce
        event.pong.loop_age.CopyFrom(duration(loop_age_s))
        for pong in batch.pongs:
            for request_id, attempt in pong.unknown:
                event.pong.unknown.add(request_id=request_id, attempt=attempt)
    return events


def _add_tokens(event: decode_pb2.SessionEvent, tokens: Tokens) -> None:
    out = event.tokens.add(
        request_id=tokens.request_id,
        attempt=tokens.attempt,
        sample=tokens.sample,
        first_index=tokens.first_index,
        ids=tokens.ids,
    )
    for logprob in tokens.logprobs:
        _add_logprob(out, logprob)


def _add_logprob(out: decode_pb2.SessionEvent.Tokens, logprob: TokenLogprob) -> None:
    entry = out.logprobs.add(token_id=logprob.token_id, logprob=logprob.logprob)
    for token_id, value in logprob.top:
        entry.top.add(token_id=token_id, logprob=value)


def _add_finished(event: decode_pb2.SessionEvent, finished: Finished, worker_id: str) -> None:
    out = event.finished.add(
        request_id=finished.request_id,
        attempt=finished.attempt,
        sample=finished.sample,
        reason=REASONS[finished.reason],
        completion_tokens=finished.completion_tokens,
        cached_prompt_tokens=finished.cached_prompt_tokens,
        timeline=timeline_to_proto(finished.timeline, worker_id),
    )
    if finished.stop_token_id is not None:
        out.stop_token_id = finished.stop_token_id


def _add_failed(event: decode_pb2.SessionEvent, failed: Failed, worker_id: str) -> None:
    failure = failed.failure
    error: WeftError = error_class(failure.reason)(
        failure.message,
        stage=failure.stage,
        param=failure.param,
        worker_id=worker_id,
        attempt=failed.attempt,
    )
    out = event.failed.add(
        request_id=failed.request_id,
        attempt=failed.attempt,
        error=error_detail(error),
        grpc_code=grpc_code(error),
    )
    if failure.retry_after_s is not None:
        out.retry_after.CopyFrom(duration(failure.retry_after_s))


def timeline_to_proto(timeline: Timeline, worker_id: str) -> common_pb2.Timeline:
    """A timeline for the wire."""
    out = common_pb2.Timeline(
        queued_time=duration(timeline.admitted_s or 0.0),
        matched_tokens=timeline.matched_tokens,
        local_prefill_tokens=timeline.local_prefill_tokens,
        fills=_fills(timeline.fills),
        steps=timeline.num_steps,
        preemptions=timeline.num_preemptions,
        worker_id=worker_id,
        drafted_tokens=timeline.num_drafted_tokens,
        accepted_tokens=timeline.num_accepted_tokens,
        tree_steps=timeline.num_tree_steps,
    )
    if timeline.first_token_s is not None:
        out.first_token_time.CopyFrom(duration(timeline.first_token_s))
    if timeline.finish_s is not None:
        out.finish_time.CopyFrom(duration(timeline.finish_s))
    if timeline.remote_cost_s is not None:
        out.remote_cost_s = timeline.remote_cost_s
    if timeline.local_cost_s is not None:
        out.local_cost_s = timeline.local_cost_s
    return out


def _fills(records: Sequence[FillRecord]) -> list[common_pb2.FillTimeline]:
    return [
        common_pb2.FillTimeline(
            source=SOURCES[record.source],
            worker_id=record.worker_id,
            transport=TRANSPORTS.get(record.transport, common_pb2.TRANSPORT_KIND_UNSPECIFIED),
            start_token=record.start_token,
            end_token=record.end_token,
            accepted_tokens=record.accepted_tokens,
            computed_tokens=record.computed_tokens,
            bytes=record.bytes,
            start_time=duration(record.start_s),
            end_time=duration(record.end_s),
            first_write_posted_time=duration(record.first_write_posted_s),
            last_chunk_computed_time=duration(record.last_chunk_computed_s),
            last_write_complete_time=duration(record.last_write_complete_s),
            failure=record.failure,
            filler_failed=record.filler_failed,
        )
        for record in records
    ]
