"""The same request over REST and over gRPC, and the same answer from both."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
from google.protobuf.json_format import ParseDict
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_prompts import MeshPrompt
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

PAGE_SIZE = 16
TIMEOUT_S = 240.0
Response = gateway_pb2.ChatResponse | gateway_pb2.CompleteResponse
REASONS = {"stop": common_pb2.FINISH_REASON_STOP, "length": common_pb2.FINISH_REASON_LENGTH}


@dataclass(frozen=True, slots=True)
class Answer:
    """The common part of both faces' answers."""

    text: str
    token_ids: list[int] | None
    """Token ids, which only gRPC returns."""
    finish_reason: common_pb2.FinishReason.ValueType
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    timeline: common_pb2.Timeline


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for one text."""

    prompt: MeshPrompt | list[int]
    """A named prompt, or token ids to continue."""
    max_tokens: int
    salt: str = ""
    """Requests of the same salt share prefixes."""
    temperature: float = 0.0
    seed: int | None = None
    ignore_eos: bool = False
    is_streamed: bool = False
    priority: int = 0
    """Priority; a lower number is more urgent."""
    stop: str = ""
    """A stop string; empty: none."""
    speculates: bool = True
    """Whether tokens may be drafted."""


def new_salt() -> str:
    """A salt under which nothing is cached."""
    return secrets.token_hex(8)


class Caller:
    """Sends asks to a mesh over both faces; an async context manager."""

    def __init__(self, mesh: LocalMesh) -> None:
        self._model = mesh.model
        self._http = httpx.AsyncClient(
            base_url=mesh.url,
            timeout=TIMEOUT_S,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self._channel = grpc.aio.insecure_channel(mesh.grpc_address)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def __aenter__(self) -> Caller:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._channel.close()

    async def ask(self, face: str, ask: Ask) -> Answer:
        """Sends it over `rest` or `grpc` and waits for the whole answer."""
        return await (self.rest(ask) if face == "rest" else self.grpc(ask))

    async def rest(self, ask: Ask) -> Answer:
        path, body = rest_request(self._model, ask)
        if ask.is_streamed:
            return await self._rest_stream(path, body)
        answer = await self._http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        content = answer.json()
        (choice,) = content["choices"]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return _from_rest(text, choice["finish_reason"], content)

    async def _rest_stream(self, path: str, body: dict[str, Any]) -> Answer:
        text, reason, last = "", "", {}
        async with self._http.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                last = json.loads(line.removeprefix("data: "))
                assert "error" not in last, last
                for choice in last["choices"]:
                    delta = choice.get("delta", choice)
                    text += delta.get("content", delta.get("text")) or ""
                    reason = choice["finish_reason"] or reason
        return _from_rest(text, reason, last)

    async def stream(self, ask: Ask) -> AsyncIterator[Response]:
        """Messages of the typed face, as they come."""
        request = grpc_request(self._model, ask)
        is_chat = isinstance(request, gateway_pb2.ChatRequest)
        call = (self.stub.Chat if is_chat else self.stub.Complete)(request, timeout=TIMEOUT_S)
        async for message in call:
            yield message

    async def grpc(self, ask: Ask) -> Answer:
        text, ids = "", []
        reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_UNSPECIFIED
        last: Response | None = None
        async for last in self.stream(ask):
            for choice in last.choices:
                text += choice.text
                ids += choice.token_ids
                reason = choice.finish_reason or reason
        assert last is not None
        return Answer(
            text,
            ids,
            reason,
            last.usage.prompt_tokens,
            last.usage.cached_prompt_tokens,
            last.usage.completion_tokens,
            last.timeline,
        )


def rest_request(model: str, ask: Ask) -> tuple[str, dict[str, Any]]:
    """Path and body of a REST request."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "ignore_eos": ask.ignore_eos,
        "priority": ask.priority,
        "weft_timeline": True,
    }
    if ask.salt:
        body["cache_salt"] = ask.salt
    if ask.stop:
        body["stop"] = [ask.stop]
    if not ask.speculates:
        body["speculate"] = False
    if ask.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if isinstance(ask.prompt, list):
        return "/v1/completions", {**body, "prompt": ask.prompt}
    if ask.prompt.is_chat:
        return "/v1/chat/completions", {**body, "messages": ask.prompt.as_messages()}
    return "/v1/completions", {**body, "prompt": ask.prompt.text}


def grpc_request(model: str, ask: Ask) -> gateway_pb2.ChatRequest | gateway_pb2.CompleteRequest:
    """The typed request."""
    shared: dict[str, Any] = {
        "model": model,
        "sampling": common_pb2.SamplingParams(
            temperature=ask.temperature, seed=ask.seed, speculate=ask.speculates
        ),
        "stop": common_pb2.StopCriteria(
            max_tokens=ask.max_tokens,
            ignore_eos=ask.ignore_eos,
            stop=[ask.stop] if ask.stop else [],
        ),
        "cache_salt": ask.salt,
        "stream": ask.is_streamed,
        "priority": ask.priority,
    }
    if isinstance(ask.prompt, list):
        tokens = common_pb2.TokenIds(ids=ask.prompt)
        return gateway_pb2.CompleteRequest(token_ids=tokens, **shared)
    if ask.prompt.is_chat:
        messages = [
            gateway_pb2.ChatMessage(role=role, content=content)
            for role, content in ask.prompt.messages
        ]
        return gateway_pb2.ChatRequest(messages=messages, **shared)
    return gateway_pb2.CompleteRequest(text=ask.prompt.text, **shared)


def _from_rest(text: str, reason: str, content: dict[str, Any]) -> Answer:
    usage = content["usage"]
    timeline = ParseDict(content["weft"]["timeline"], common_pb2.Timeline())
    return Answer(
        text,
        None,
        REASONS[reason],
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        timeline,
    )


def num_fillable(num_prompt_tokens: int) -> int:
    """Tokens of a prompt that a store can fill: its full pages without its last token."""
    return (num_prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def num_shipped(num_prompt_tokens: int) -> int:
    """Tokens of a prompt, of which nothing is cached, that a prefill worker fills: its full pages.

    None of at most one page, of which the owner computes the last token anyway.
    """
    has_more = num_prompt_tokens > PAGE_SIZE
    return num_prompt_tokens // PAGE_SIZE * PAGE_SIZE if has_more else 0


def way_of(answer: Answer) -> str:
    """The way that a request went, in a line. Without fills nobody was asked: the gateway knew of
    no healthy prefill worker, or the decode worker took the prompt itself.
    """
    timeline = answer.timeline
    fills = [
        f"{fill.worker_id} by {common_pb2.TransportKind.Name(fill.transport)}: "
        f"{fill.accepted_tokens} of {fill.end_token - fill.start_token} tokens"
        + (f", failed: {fill.failure}" if fill.failure else "")
        for fill in timeline.fills
    ]
    return (
        f"{answer.prompt_tokens} prompt tokens at {timeline.worker_id}: "
        f"{timeline.matched_tokens} found, fills {fills or 'none'}, "
        f"{timeline.local_prefill_tokens} computed; {timeline.steps} steps, "
        f"{timeline.preemptions} pre-emptions, {len(timeline.lost_attempts)} lost attempts, "
        f"expected seconds there {timeline.remote_cost_s:.3g}, here {timeline.local_cost_s:.3g}"
    )


def check_way(way: str, answer: Answer) -> None:
    """Asserts by the timeline that a first request went this way.

    Args:
        way: `nixl`, `data` (shipped so), `local`, `hit` (all of it was cached here) or
            `preempted`.
        answer: Its prompt may have been too short to be shipped or cached.
    """
    timeline, num_tokens = answer.timeline, answer.prompt_tokens
    told = way_of(answer)
    shipped = sum(fill.accepted_tokens for fill in timeline.fills)
    if way in ("nixl", "data"):
        kind = common_pb2.TransportKind.Value(f"TRANSPORT_KIND_{way.upper()}")
        assert {fill.transport for fill in timeline.fills} <= {kind}, told
        assert not [fill.failure for fill in timeline.fills if fill.failure], told
        assert (timeline.matched_tokens, shipped) == (0, num_shipped(num_tokens)), told
        assert timeline.local_prefill_tokens == max(num_tokens - shipped, 1), told
        return
    assert not timeline.fills, told
    if way == "hit":
        # The answer before has filled pages too; the prompt's last token is computed again.
        cached = (num_tokens + answer.completion_tokens - 1) // PAGE_SIZE * PAGE_SIZE
        matched = min(num_tokens - 1, cached)
        assert timeline.matched_tokens == answer.cached_tokens == matched, told
        assert timeline.local_prefill_tokens == num_tokens - matched, told
    else:
        assert timeline.matched_tokens == 0, told
        assert timeline.local_prefill_tokens == num_tokens, told
    assert (timeline.preemptions > 0) == (way == "preempted"), told
