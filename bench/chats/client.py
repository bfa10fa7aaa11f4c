"""Sends chats to a gateway and records the outcome of each turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio
from weft.common.rpc.errors import from_rpc_error
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from chats.workload import Chat, EndlessCache

_TIMEOUT_S = 300.0


@dataclass(slots=True)
class Turn:
    """One request. Times are seconds since it was sent."""

    chat: str
    number: int
    num_prompt: int
    sent_s: float
    """Time after the beginning of the run."""
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0
    """Time to the first token."""
    end_s: float = 0.0
    """Time to the last token, or to the refusal."""
    error: str = ""
    """Error message; empty: it was answered."""
    reason: str = ""
    """Reason of a typed Weft error, UPPER_SNAKE."""
    timeline: common_pb2.Timeline | None = None

    @property
    def between_s(self) -> float | None:
        """Mean time between tokens; None of a single one."""
        gaps = len(self.tokens) - 1
        return (self.end_s - self.first_s) / gaps if gaps > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Parameters of all turns."""

    max_tokens: int
    """Most tokens of every answer."""
    api_key: str = ""
    """API key; empty: none."""
    targets: gateway_pb2.LatencyTargets | None = None
    """Targets of every request; None: the gateway's own for the tenant."""
    goes_on: bool = False
    """Whether a chat continues after a refused turn; if not, it ends there."""


class ChatClient:
    """A client of one gateway, over one channel; an async context manager.

    Args:
        address: host:port.
        model: Name in requests.
    """

    def __init__(self, address: str, model: str) -> None:
        options = [("grpc.enable_http_proxy", 0)]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)
        self._model = model

    async def __aenter__(self) -> ChatClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def run(
        self, chats: Iterable[Chat], asking: Asking, oracle: EndlessCache | None = None
    ) -> list[Turn]:
        """Runs all chats, each at its time; returns every turn that was sent."""
        began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._have(chat, asking, oracle, began)) for chat in chats]
        return [turn for task in running for turn in task.result()]

    async def _have(
        self, chat: Chat, asking: Asking, oracle: EndlessCache | None, began: float
    ) -> list[Turn]:
        await asyncio.sleep(began + chat.start_s - time.perf_counter())
        said, turns = list(chat.system), []
        for number, message in enumerate(chat.messages):
            if number:
                await asyncio.sleep(chat.pauses_s[number - 1])
            said += message
            if oracle is not None:
                oracle.sent(said)
            turn = Turn(chat.name, number, len(said), time.perf_counter() - began)
            turns.append(turn)
            await self._ask(turn, said, asking)
            said += turn.tokens
            if oracle is not None:
                oracle.ended(said)
            if turn.error and not asking.goes_on:
                break
        return turns

    async def _ask(self, turn: Turn, prompt: Sequence[int], asking: Asking) -> None:
        request = gateway_pb2.CompleteRequest(
            model=self._model,
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stop=common_pb2.StopCriteria(max_tokens=asking.max_tokens, ignore_eos=True),
            stream=True,
            targets=asking.targets,
        )
        metadata = [("x-routing-key", turn.chat)]
        if asking.api_key:
            metadata.append(("authorization", f"Bearer {asking.api_key}"))
        sent = time.perf_counter()
        call = self._stub.Complete(request, metadata=tuple(metadata), timeout=_TIMEOUT_S)
        try:
            async for message in call:
                if message.HasField("timeline"):
                    turn.timeline = message.timeline
                new = [token for choice in message.choices for token in choice.token_ids]
                if new:
                    turn.end_s = time.perf_counter() - sent
                    turn.first_s = turn.first_s or turn.end_s
                    turn.tokens += new
        except grpc.aio.AioRpcError as error:
            turn.end_s = time.perf_counter() - sent
            turn.error = f"{error.code().name}: {error.details()}"
            turn.reason = from_rpc_error(error).reason
