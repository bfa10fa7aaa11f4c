"""Runs a request of one sample and sends its answer, for all dialects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import Context
from weft.contract.errors import ContextTooLong, WeftError
from weft.gateway.api.call import begin_answer
from weft.gateway.api.openai.chunks import to_json
from weft.gateway.api.relay import EdgeFace
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import RawRequest

JSON = "application/json"
EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"


def json_body(value: object) -> HttpBody:
    return HttpBody(content_type=JSON, data=to_json(value))


def or_empty(request: HttpBody) -> HttpBody:
    """An empty object if a client has sent no body."""
    return request if request.data else HttpBody(content_type=JSON, data=b"{}")


def named_event(name: str, value: Mapping[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(value))


class DialectWriter(Protocol):
    """Writes one answer of one sample. `push` takes every delta, whether the answer is streamed or
    not.
    """

    content_type: str
    """Content type of a streamed answer."""

    def begin(self) -> bytes:
        """The first bytes of a streamed answer, before there is any text."""
        ...

    def push(self, delta: Delta) -> bytes:
        """Takes a delta; returns the bytes that a streamed answer gains."""
        ...

    def end(self) -> bytes:
        """The last bytes of a streamed answer, once its usage is known."""
        ...

    def whole(self) -> Mapping[str, object]:
        """The whole answer, once its usage is known."""
        ...


async def run_answer(
    pipeline: RequestPipeline,
    raw: RawRequest,
    make_writer: Callable[[Answer], DialectWriter],
    context: Context,
    relays: EdgeFace,
    *,
    is_streamed: bool,
    headers: tuple[tuple[str, str], ...] = (),
    before_end: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Runs a request of one prompt and one sample, and sends its answer. `headers` are sent ahead
    of the answer; `before_end` is awaited once the answer is whole, before its end is sent. Raises
    WeftError if the request was refused or failed.
    """
    async with pipeline.open(raw) as answer:
        writer = make_writer(answer)
        kind, headers = writer.content_type if is_streamed else JSON, (*answer.headers, *headers)
        if is_streamed:
            with relays.stream_of(context, kind) as out:
                await begin_answer(context, raw.request_id, kind, (*headers, *out.headers))
                if (data := writer.begin()) and not out.send(data):
                    await out.ready()
                await answer.stream(lambda deltas: b"".join(map(writer.push, deltas)), out)
        else:
            await begin_answer(context, raw.request_id, kind, headers)
            while deltas := await answer.next_deltas():
                for delta in deltas:
                    writer.push(delta)
        await answer.settle()
        last = writer.end() if is_streamed else to_json(writer.whole())
    if before_end is not None:
        await before_end()
    await context.write(HttpBody(content_type=kind, data=last))


@contextmanager
def field_names(
    names: Mapping[str, str], parts: Mapping[str, str], too_long: str = ""
) -> Iterator[None]:
    """Errors raised inside get `param` in the dialect's spelling. `names` maps fields of the
    internal request to the dialect's.

    Args:
        parts: Parts of names, such as ".function." of a tool's fields.
        too_long: Words of the API for a prompt that is too long, by which its clients know that
            they must shorten it, with `{tokens}`, `{context}` and `{above}`; empty: the gateway's.
    """
    try:
        yield
    except WeftError as error:
        if too_long and isinstance(error, ContextTooLong) and error.num_prompt_tokens:
            tokens, context = error.num_prompt_tokens, error.max_tokens
            error.message = too_long.format(
                tokens=tokens, context=context, above=max(1, tokens - context)
            )
        if error.param:
            named = names.get(error.param, error.param)
            for part, replacement in parts.items():
                named = named.replace(part, replacement)
            if error.message.startswith(error.param):
                error.message = named + error.message[len(error.param) :]
            error.param = named
        raise
