"""Conversion of a step's results to events of a Session, none above the size limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

from weft.common.rpc.errors import error_detail, grpc_code
from weft.contract.codec.pairs import ACCEPTED, FINISHED, PREEMPTED
from weft.contract.codec.walk import duration
from weft.contract.errors import WeftError, error_class
from weft.contract.request import PromptLogprobs, TokenLogprob
from weft.contract.submits import (
    Failed,
    Finished,
    GatewayBatch,
    Pong,
    Routes,
    TokenColumns,
    Tokens,
)
from weft.contract.tasks import PooledVectors
from weft.v1 import decode_pb2

MAX_EVENT_BYTES = 256 << 10
"""Largest SessionEvent, bytes."""
_MAX_UNKNOWN = 2000
"""Most attempts in one pong, of 80 bytes each."""
# Upper bounds of entries: an id has 64 bytes, a number 5, a tag with a length up to 4.
_KEY_BYTES = 96
_TOKEN_BYTES = 5
_LOGPROB_BYTES = 16
_ALTERNATIVE_BYTES = 13
_NUMBER_BYTES = 4
"""Bytes of a number of a vector."""
_ROW_BYTES = 20
"""Of a row of columns: a number of a stream has up to 10 bytes, the others 5."""
_MAX_ROWS = (MAX_EVENT_BYTES // 2) // _ROW_BYTES
_ENTRY_BYTES = 8
"""Size of an entry in addition to its own bytes."""


class _Events:
    def __init__(self) -> None:
        self._last = decode_pb2.SessionEvent()
        self._full: list[decode_pb2.SessionEvent] = []
        self._num_bytes = 0

    def room(self, num_bytes: int) -> decode_pb2.SessionEvent:
        """The event that has room for an entry of at most this many bytes."""
        self._num_bytes += num_bytes
        if self._num_bytes > MAX_EVENT_BYTES:
            self._full.append(self._last)
            self._last, self._num_bytes = decode_pb2.SessionEvent(), num_bytes
        return self._last

    def take_full(self) -> list[decode_pb2.SessionEvent]:
        full, self._full = self._full, []
        return full

    def take(self) -> list[decode_pb2.SessionEvent]:
        """Takes all messages, the unfinished one included."""
        return [*self.take_full(), self._last]


def merge_batches(batches: Iterable[GatewayBatch]) -> GatewayBatch:
    """Joins everything not sent yet into one batch; consecutive tokens of a sample become one
    entry.
    """
    merged = GatewayBatch(gateway=-1)
    last: dict[tuple[str, int, int], Tokens] = {}
    for batch in batches:
        merged.accepted += batch.accepted
        merged.computed_here += batch.computed_here
        merged.prompt_logprobs += batch.prompt_logprobs
        merged.vectors += batch.vectors
        merged.routes += batch.routes
        for tokens in batch.all_tokens():
            key = (tokens.request_id, tokens.attempt, tokens.sample)
            known = last.get(key)
            if known is not None and _follows(tokens, known):
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


def _follows(tokens: Tokens, known: Tokens) -> bool:
    """Either all tokens of an entry have log-probabilities or none has."""
    is_next = tokens.first_index == known.first_index + len(known.ids)
    return is_next and bool(tokens.logprobs) == bool(known.logprobs)


def batch_to_proto(
    batch: GatewayBatch,
    worker_id: str,
    loop_age_s: float,
    streams: Mapping[tuple[str, int], int] = MappingProxyType({}),
) -> Iterator[decode_pb2.SessionEvent]:
    """Converts a batch to events below the size limit: log-probabilities of prompts, then tokens,
    then routes of experts, then ends. There may be very many log-probabilities, so each event is
    converted when it is asked for. `streams` has the number of the first sample of attempts
    (request id, attempt) whose tokens may come as columns.
    """
    events = _Events()
    for accepted in batch.accepted:
        events.room(_KEY_BYTES).accepted.add(**ACCEPTED.plain(accepted))
    for request_id, attempt in batch.computed_here:
        events.room(_KEY_BYTES).computed_here.add(request_id=request_id, attempt=attempt)
    for scores in batch.prompt_logprobs:
        for _ in _add_prompt_logprobs(events, scores):
            yield from events.take_full()
    for vectors in batch.vectors:
        for _ in _add_vectors(events, vectors):
            yield from events.take_full()
    for tokens in batch.tokens:
        _add_tokens(events, tokens)
    for columns in batch.columns:
        _add_columns(events, columns, streams)
    for routes in batch.routes:
        for _ in _add_routes(events, routes):
            yield from events.take_full()
    for preempted in batch.preempted:
        events.room(_KEY_BYTES).preempted.add(**PREEMPTED.plain(preempted))
    for finished in batch.finished:
        end = _finished(finished, worker_id)
        events.room(_ENTRY_BYTES + end.ByteSize()).finished.append(end)
    for failed in batch.failed:
        failure = _failed(failed, worker_id)
        events.room(_ENTRY_BYTES + failure.ByteSize()).failed.append(failure)
    if batch.pongs:
        _add_pongs(events, batch.pongs, loop_age_s)
    yield from events.take()


def _add_tokens(events: _Events, tokens: Tokens) -> None:
    request_id, attempt, sample, first_index, ids, logprobs = tokens
    token_bytes = _TOKEN_BYTES
    if logprobs:
        most = max(len(logprob.top) for logprob in logprobs)
        token_bytes += _LOGPROB_BYTES + _ALTERNATIVE_BYTES * most
    num_bytes = _KEY_BYTES + token_bytes * len(ids)
    if num_bytes > MAX_EVENT_BYTES:
        half = len(ids) // 2
        head = tokens._replace(ids=ids[:half], logprobs=logprobs[:half])
        _add_tokens(events, head)
        _add_tokens(
            events,
            tokens._replace(
                first_index=first_index + half, ids=ids[half:], logprobs=logprobs[half:]
            ),
        )
        return
    out = events.room(num_bytes).tokens.add(
        request_id=request_id, attempt=attempt, sample=sample, first_index=first_index, ids=ids
    )
    for logprob in logprobs:
        _add_logprob(out, logprob)


def _add_prompt_logprobs(events: _Events, scores: PromptLogprobs) -> Iterator[None]:
    """Yields after each entry."""
    request_id, attempt, position, logprobs = scores
    most = max(len(logprob.top) for logprob in logprobs)
    each = _TOKEN_BYTES + _LOGPROB_BYTES + _ALTERNATIVE_BYTES * most
    count = (MAX_EVENT_BYTES - _KEY_BYTES) // each
    for start in range(0, len(logprobs), count):
        some = logprobs[start : start + count]
        out = events.room(_KEY_BYTES + each * len(some)).prompt_logprobs.add(
            request_id=request_id, attempt=attempt, first_position=position + start
        )
        for logprob in some:
            _add_logprob(out, logprob)
        yield


def _add_vectors(events: _Events, vectors: PooledVectors) -> Iterator[None]:
    """Yields after each entry."""
    request_id, attempt, first_row, width, values = vectors
    row_bytes = _NUMBER_BYTES * width
    count = max(1, (MAX_EVENT_BYTES - _KEY_BYTES) // row_bytes)
    for start in range(0, len(values), count * row_bytes):
        some = values[start : start + count * row_bytes]
        events.room(_KEY_BYTES + len(some)).vectors.add(
            request_id=request_id,
            attempt=attempt,
            first_row=first_row + start // row_bytes,
            width=width,
            values=some,
        )
        yield


def _add_routes(events: _Events, routes: Routes) -> Iterator[None]:
    """Yields after each entry."""
    count = max(1, (MAX_EVENT_BYTES - _KEY_BYTES) // routes.position_bytes)
    for start in range(0, len(routes.numbers), count * routes.position_bytes):
        some = routes.numbers[start : start + count * routes.position_bytes]
        first = routes.first_position + start // routes.position_bytes
        part = routes._replace(first_position=first, numbers=some)
        events.room(_KEY_BYTES + len(some)).routes.add(**part._asdict())
        yield


def _add_columns(
    events: _Events, columns: TokenColumns, streams: Mapping[tuple[str, int], int]
) -> None:
    """Makes no intermediate object for a token, since a step has hundreds."""
    keys = zip(columns.request_ids, columns.attempts, strict=True)
    firsts = [streams.get(key, 0) for key in keys]
    if columns.logprobs or not all(firsts):
        others = [row for row, first in enumerate(firsts) if not first or row in columns.logprobs]
        _add_rows(events, columns.of_rows(others))
        left = set(range(len(firsts))).difference(others)
        columns = columns.of_rows(sorted(left))
        firsts = [firsts[row] for row in sorted(left)]
    numbers = [first + sample for first, sample in zip(firsts, columns.samples, strict=True)]
    for start in range(0, len(numbers), _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        out = events.room(_ROW_BYTES * len(numbers[rows])).columns
        out.streams.extend(numbers[rows])
        out.indices.extend(columns.indices[rows])
        out.ids.extend(columns.ids[rows])


def _add_rows(events: _Events, columns: TokenColumns) -> None:
    logprobs = columns.logprobs
    for row, (request_id, attempt, sample, index, token) in enumerate(columns.rows()):
        num_bytes, logprob = _KEY_BYTES + _TOKEN_BYTES, logprobs.get(row)
        if logprob is not None:
            num_bytes += _LOGPROB_BYTES + _ALTERNATIVE_BYTES * len(logprob.top)
        out = events.room(num_bytes).tokens.add(
            request_id=request_id, attempt=attempt, sample=sample, first_index=index, ids=(token,)
        )
        if logprob is not None:
            _add_logprob(out, logprob)


def _add_logprob(
    out: decode_pb2.SessionEvent.Tokens | decode_pb2.SessionEvent.PromptLogprobs,
    logprob: TokenLogprob,
) -> None:
    entry = out.logprobs.add(token_id=logprob.token_id, logprob=logprob.logprob)
    for token_id, value in logprob.top:
        entry.top.add(token_id=token_id, logprob=value)


def _add_pongs(events: _Events, pongs: Sequence[Pong], loop_age_s: float) -> None:
    unknown = [
        decode_pb2.Attempt(request_id=request_id, attempt=attempt)
        for pong in pongs
        for request_id, attempt in pong.unknown
    ]
    for start in range(0, max(1, len(unknown)), _MAX_UNKNOWN):
        out = decode_pb2.SessionEvent.Pong(
            nonce=pongs[-1].nonce,
            loop_age=duration(loop_age_s),
            unknown=unknown[start : start + _MAX_UNKNOWN],
        )
        events.room(_ENTRY_BYTES + out.ByteSize()).pong.MergeFrom(out)


def _finished(finished: Finished, worker_id: str) -> decode_pb2.SessionEvent.Finished:
    message = FINISHED.encode(finished)
    message.timeline.worker_id = worker_id
    return message


def _failed(failed: Failed, worker_id: str) -> decode_pb2.SessionEvent.Failed:
    failure = failed.failure
    error: WeftError = error_class(failure.reason)(
        failure.message,
        stage=failure.stage,
        param=failure.param,
        worker_id=worker_id,
        attempt=failed.attempt,
    )
    retry_after_s = failure.retry_after_s
    return decode_pb2.SessionEvent.Failed(
        request_id=failed.request_id,
        attempt=failed.attempt,
        error=error_detail(error),
        grpc_code=grpc_code(error),
        retry_after=None if retry_after_s is None else duration(retry_after_s),
    )
