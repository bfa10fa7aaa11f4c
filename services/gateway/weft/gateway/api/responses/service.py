"""The Responses API over gRPC: weft.v1.ResponsesService."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from google.api.httpbody_pb2 import HttpBody
from weft.common.rpc.errors import Context
from weft.contract.errors import WeftError
from weft.gateway.admission.authenticate import current_tenant
from weft.gateway.admission.keys import Tenant, name_of
from weft.gateway.api.answer import (
    EVENTS,
    JSON,
    field_names,
    json_body,
    run_answer,
)
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.chunks import to_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.responses.bodies import ItemBody, ResponsesBody
from weft.gateway.api.responses.items import Item, page_of, shown_items
from weft.gateway.api.responses.store import ResponseStore, StoredResponse
from weft.gateway.api.responses.translate import (
    NAMES,
    PARTS,
    TOO_LONG,
    AskedResponse,
    Conversation,
    History,
    continued,
    referred_items,
    response_request,
)
from weft.gateway.api.responses.writer import PREFIX, ResponseWriter
from weft.gateway.catalogue import Catalogue
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.request import RawRequest
from weft.gateway.validate import invalid, unsupported
from weft.v1 import dialects_pb2, dialects_pb2_grpc

_CANCEL_S = 5.0
"""Seconds to wait for the end of a cancelled response."""
_SHOWN_CHARS = 80
_MAX_REFERRED = 64
"""Most responses whose items one input may refer to."""


class ResponseNotFound(WeftError):
    """There is no such response of the calling tenant."""

    reason = "RESPONSE_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


@dataclass(slots=True)
class _Running:
    tenant: Tenant | None
    writer: ResponseWriter | None = None
    """The writer of the response; None: the response has not begun."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class _Past(NamedTuple):
    """The conversation that a response answers."""

    history: History
    """Messages for the chat template, without those of the request."""
    items: Sequence[Mapping[str, Any]]
    """Items of the API."""


class ResponsesFace(dialects_pb2_grpc.ResponsesServiceServicer):
    """Parses bodies, converts them, writes answers, and keeps them for later ones."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        bodies: BodyParser,
        store: ResponseStore,
        relays: EdgeFace,
        gateway: str,
    ) -> None:
        """`gateway` names this gateway in ids of responses: letters and digits."""
        self._pipeline = pipeline
        self._models = models
        self._bodies = bodies
        self._store = store
        self._relays = relays
        self._gateway = gateway
        self._running: dict[str, _Running] = {}

    async def CreateResponse(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        facts = call_facts(context, f"{PREFIX}{self._gateway}")
        tenant = facts.tenant
        num_bytes = len(request.data)
        # Its errors have the body's own names, among which `messages` is a mistake of the client.
        body, ids = await self._bodies.parse(ResponsesBody, request, referred_items)
        with field_names(NAMES, PARTS, TOO_LONG):
            items = await self._items(tenant, ids)
            asked = await self._bodies.run(
                num_bytes,
                lambda: response_request(body, facts, lambda id_: _item(items, id_)),
            )
            past = await self._past(tenant, body.previous_response_id)
            raw = continued(asked, past.history)
            running = self._running[facts.request_id] = _Running(tenant)
            given: list[Item] = []
            if body.store is not False:
                suffix = facts.request_id.removeprefix(PREFIX)
                given = shown_items(body.input, lambda id_: _item(items, id_), suffix)
            past = _Past(past.history, [*past.items, *given])
            try:
                await self._answer(running, raw, body, asked, past, context)
            finally:
                del self._running[facts.request_id]
                running.ended.set()

    async def _answer(
        self,
        running: _Running,
        raw: RawRequest,
        body: ResponsesBody,
        asked: AskedResponse,
        past: _Past,
        context: Context,
    ) -> None:
        ended: list[Mapping[str, object]] = []

        async def keep() -> None:
            if body.store is not False:
                await self._keep(raw, asked, past, ended[-1])

        def make_writer(answer: Answer) -> ResponseWriter:
            running.writer = ResponseWriter(body, answer, ended.append)
            return running.writer

        try:
            await run_answer(
                self._pipeline,
                raw,
                make_writer,
                context,
                self._relays,
                is_streamed=bool(body.stream),
                before_end=keep,
            )
        except WeftError as error:
            writer = running.writer
            if writer is None or not writer.has_begun:
                raise
            # The failure is the last event, with the next sequence number.
            await context.write(HttpBody(content_type=EVENTS, data=writer.failed(error)))

    async def RetrieveResponse(
        self, request: dialects_pb2.RetrieveResponseRequest, context: Context
    ) -> HttpBody:
        if request.stream:
            raise unsupported("stream", "events of a stored response")
        tenant = current_tenant.get()
        running = self._running_of(tenant, request.response_id)
        if running is not None and running.writer is not None:
            return json_body(running.writer.response("in_progress"))
        stored = await self._stored(tenant, request.response_id, "response_id")
        return HttpBody(content_type=JSON, data=stored.response)

    async def ListInputItems(
        self, request: dialects_pb2.ListInputItemsRequest, context: Context
    ) -> HttpBody:
        tenant = current_tenant.get()
        stored = await self._stored(tenant, request.response_id, "response_id")
        return json_body(page_of(json.loads(stored.items), request))

    async def CountInputTokens(self, request: HttpBody, context: Context) -> HttpBody:
        facts = call_facts(context, f"{PREFIX}{self._gateway}")
        num_bytes = len(request.data)
        body, ids = await self._bodies.parse(ResponsesBody, request, referred_items)
        with field_names(NAMES, PARTS, TOO_LONG):
            items = await self._items(facts.tenant, ids)
            asked = await self._bodies.run(
                num_bytes,
                lambda: response_request(body, facts, lambda id_: _item(items, id_)),
            )
            past = await self._past(facts.tenant, body.previous_response_id)
            (prompt,) = continued(asked, past.history).prompts
            resolved = await self._models.find(body.model or "")
            card = await self._models.card(resolved)
            counted = await resolved.served.preparer.tokenize(card, prompt)
        await begin_answer(context, facts.request_id)
        return json_body({"object": "response.input_tokens", "input_tokens": len(counted)})

    async def DeleteResponse(
        self, request: dialects_pb2.DeleteResponseRequest, context: Context
    ) -> HttpBody:
        tenant, id_ = current_tenant.get(), request.response_id
        if not await self._store.delete(name_of(tenant), id_):
            raise self._missing(id_, "response_id")
        return json_body({"id": id_, "object": "response", "deleted": True})

    async def CancelResponse(
        self, request: dialects_pb2.CancelResponseRequest, context: Context
    ) -> HttpBody:
        tenant, id_ = current_tenant.get(), request.response_id
        running = self._running_of(tenant, id_)
        if running is None:
            stored = await self._stored(tenant, id_, "response_id")
            if json.loads(stored.response)["status"] != "cancelled":
                raise invalid("response_id", "this response has ended; nothing is left to cancel")
            return HttpBody(content_type=JSON, data=stored.response)
        self._pipeline.cancel(id_, tenant)
        try:
            async with asyncio.timeout(_CANCEL_S):
                await running.ended.wait()
        except TimeoutError:
            pass  # The response is cancelled; its client has just not read the end yet.
        if running.writer is None:
            raise self._missing(id_, "response_id")
        return json_body(running.writer.response("cancelled"))

    def _running_of(self, tenant: Tenant | None, id_: str) -> _Running | None:
        running = self._running.get(id_)
        return running if running is not None and running.tenant == tenant else None

    async def _stored(self, tenant: Tenant | None, id_: str, param: str) -> StoredResponse:
        stored = await self._store.get(name_of(tenant), id_)
        if stored is None:
            raise self._missing(id_, param)
        return stored

    def _missing(self, id_: str, param: str) -> ResponseNotFound:
        maker, _, _ = id_.removeprefix(PREFIX).partition("-")
        why = "it was not stored, or the room for it was needed"
        if self._store.is_shared:
            why = "it was not stored, has expired, or is not complete yet"
        elif id_.startswith(PREFIX) and maker != self._gateway:
            why = "another gateway made it, or this one before a restart; they share no responses"
        return ResponseNotFound(
            f"{param}: there is no response `{id_[:_SHOWN_CHARS]}` here: {why}; send the whole "
            "conversation as input",
            stage="validate",
            param=param,
        )

    async def _past(self, tenant: Tenant | None, id_: str | None) -> _Past:
        """The conversation up to and including a response; empty without an id."""
        if id_ is None:
            return _Past(History(), [])
        stored = await self._stored(tenant, id_, "previous_response_id")
        output = json.loads(stored.response)["output"]
        history = History.from_json(json.loads(stored.history))
        return _Past(history, [*json.loads(stored.items), *output])

    async def _items(self, tenant: Tenant | None, ids: Sequence[str]) -> dict[str, Any]:
        """All output items, by id, of each stored response that a wanted item belongs to."""
        makers = list(dict.fromkeys(_maker(id_) for id_ in ids))
        if len(makers) > _MAX_REFERRED:
            raise invalid("input", f"refers to items of more than {_MAX_REFERRED} responses")
        items: dict[str, Any] = {}
        for maker in makers:
            stored = await self._store.get(name_of(tenant), maker)
            output = [] if stored is None else json.loads(stored.response)["output"]
            items |= {item["id"]: item for item in output}
        return items

    async def _keep(
        self,
        raw: RawRequest,
        asked: AskedResponse,
        past: _Past,
        response: Mapping[str, object],
    ) -> None:
        answer = Conversation()
        output: Any = response["output"]
        for item in output:
            answer.add(ItemBody.model_validate(item), "output")
        messages = [*past.history.messages, *asked.stored.messages, *answer.messages]
        history = History(messages, [*past.history.files, *asked.stored.files])
        stored = StoredResponse(to_json(response), to_json(history.to_json()), to_json(past.items))
        await self._store.put(raw.call.tenant_name, raw.request_id, stored)


def _maker(item_id: str) -> str:
    return f"{PREFIX}{item_id.partition('_')[2].rpartition('_')[0]}"


def _item(items: Mapping[str, Any], id_: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = items.get(id_)
    if found is None:
        raise ResponseNotFound(
            f"input: there is no item `{id_[:_SHOWN_CHARS]}` here; send the item itself",
            stage="validate",
            param="input",
        )
    return found
