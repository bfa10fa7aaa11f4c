"""A gateway with scripted workers, on the test's own event loop and real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from tokenizers import Tokenizer
from weft.gateway.app import GatewayApp
from weft.gateway.fleet.discovery import Discovery, Role
from weft.gateway.routing import PoolView
from weft.gateway.settings import GatewaySettings
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.v1 import decode_pb2, dialects_pb2_grpc, gateway_pb2_grpc, openai_pb2_grpc, worker_pb2

MODEL = "tiny"
ScriptOf = Callable[[decode_pb2.Submit, list[int]], Script]


class Harness:
    """Everything that a test uses."""

    def __init__(self, app: GatewayApp, workers: list[FakeWorker], channel: Any) -> None:
        self.app = app
        self.workers = workers
        self.channel = channel
        self.typed = gateway_pb2_grpc.GatewayServiceStub(channel)
        self.openai = openai_pb2_grpc.OpenAIServiceStub(channel)
        self.tokenizer: Tokenizer = app.model.tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    @property
    def end(self) -> int:
        return int(self.tokenizer.token_to_id("<|im_end|>"))

    def known_pages(self, role: Role) -> list[int]:
        """Pages of each worker of a role that the gateway has an id of, as far as it knows."""
        index = self.app.catalogue.base(MODEL).router.index(role)
        assert index is not None
        members = [worker.member for worker in self.app.fleet.workers(role)]
        view = PoolView(tuple(member for member in members if member is not None))
        sizes: list[int] = np.asarray(index.sizes(view)).tolist()
        return sizes

    async def post(self, method: str, body: object) -> list[HttpBody]:
        """Messages of a REST method; `body` is JSON-encoded unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = HttpBody(content_type="application/json", data=data)
        call = getattr(self.openai, method)(request)
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return [await call]
        return [message async for message in call]

    async def json(self, method: str, body: object) -> Any:
        messages = await self.post(method, body)
        assert len(messages) == 1
        assert messages[0].content_type == "application/json"
        return json.loads(messages[0].data)

    async def dialect(self, service: str, method: str, body: object) -> Any:
        """Calls a method of another dialect than OpenAI's chats."""
        stub = getattr(dialects_pb2_grpc, f"{service}ServiceStub")(self.channel)
        request = HttpBody(content_type="application/json", data=json.dumps(body).encode())
        call = getattr(stub, method)(request)
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            return json.loads((await call).data)
        return [json.loads(message.data) async for message in call][-1]

    async def events(self, method: str, body: dict[str, object]) -> list[Any]:
        """Parsed events of a stream; checks its framing."""
        messages = await self.post(method, {**body, "stream": True})
        assert {message.content_type for message in messages} == {
            "text/event-stream; charset=utf-8"
        }
        for message in messages:
            assert message.data.endswith(b"\n\n")
        events = b"".join(message.data for message in messages).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        assert all(event.startswith("data: ") for event in events[:-1])
        return [json.loads(event[6:]) for event in events[:-2]]

    async def wait(self, condition: Callable[[], object], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                await asyncio.sleep(0.01)

    async def ready(self) -> None:
        async with asyncio.timeout(60):
            while True:
                try:
                    await self.openai.Ready(Empty())
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.02)

    def is_every_worker_usable(self) -> bool:
        """Whether any worker may get the next request.

        The gateway is ready with its first decode worker; the others get nothing before their
        first load report.
        """
        now = asyncio.get_running_loop().time()
        known = [one for one in self.app.fleet.workers() if one.info is not None]
        return len(known) == len(self.workers) and not any(one.problem(now) for one in known)


@asynccontextmanager
async def gateway(
    folder: Path,
    script: ScriptOf,
    *,
    num_decode: int = 1,
    num_prefill: int = 0,
    tokenizer: Tokenizer | None = None,
    max_context_tokens: int = 512,
    wait: bool = True,
    step_s: float = 0.002,
    discovery: Discovery | None = None,
    adapter_root: Path | None = None,
    generation: Mapping[str, object] | None = None,
    change_model: Callable[[Path], None] | None = None,
    **settings: Any,
) -> AsyncIterator[Harness]:
    """Starts workers and a gateway in front of them.

    `generation`: what the model's generation_config.json says besides. `change_model` changes its
    directory before it is read.
    """
    tokenizer = tokenizer or byte_level_bpe()
    model_dir = write_model_dir(folder / MODEL, tokenizer, max_context_tokens)
    if generation is not None:
        file = model_dir / "generation_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(generation)))
    if change_model is not None:
        change_model(model_dir)
    workers = [
        FakeWorker(
            MODEL,
            tokenizer.get_vocab_size(),
            script,
            worker_id=f"decode-{index}",
            max_context_tokens=max_context_tokens,
            step_s=step_s,
        )
        for index in range(num_decode)
    ] + [
        FakeWorker(
            MODEL,
            tokenizer.get_vocab_size(),
            script,
            worker_id=f"prefill-{index}",
            role=worker_pb2.WORKER_ROLE_PREFILL,
        )
        for index in range(num_prefill)
    ]
    for worker in workers:
        worker.others = workers
    addresses = [await worker.start() for worker in workers]
    if adapter_root is not None:
        for worker in workers:
            worker.follow_adapters(adapter_root)
    settings = {
        "load_interval_s": 0.05,
        "ping_interval_s": 0.2,
        "stale_after_s": 0.6,
        "drain_grace_s": 0.5,
        "metrics_port": None,
        **settings,
    }
    app = GatewayApp(
        GatewaySettings(
            port=0,
            model_dir=model_dir,
            decode=addresses[:num_decode],
            prefill=addresses[num_decode:],
            adapter_root=adapter_root,
            **settings,
        ),
        discovery=discovery,
    )
    await app.start()
    try:
        async with grpc.aio.insecure_channel(
            app.server.address, options=(("grpc.max_send_message_length", 1 << 28),)
        ) as channel:
            harness = Harness(app, workers, channel)
            if wait:
                await harness.wait(harness.is_every_worker_usable)
                await harness.ready()
            yield harness
    finally:
        await app.stop()
        for worker in workers:
            await worker.stop()
