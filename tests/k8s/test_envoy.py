"""Envoy itself in front of REST edges, with an edge as its endpoint picker."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.cli.up.ports import free_run
from weft.testing.k8s.envoy import DESTINATION, FAILS_OPEN, LISTENERS, SUBSET, TOOLS, Envoy
from weft.testing.meshes.metric_names import documented, exposed
from weft.testing.meshes.tiny_mesh import VOCAB, TinyMesh
from weft.testing.services.dialect_edge import TEMPLATE
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import decode_pb2

pytestmark = [pytest.mark.needs("go", "envoy"), pytest.mark.timeout(300)]

TEXT = "Weft antwortet: déjà vu 你好 🎉. All of it comes."
MODES = sorted(LISTENERS)
MAX_BODY = 4 << 20


class Pool:
    """Two edges that serve, and a third that only picks."""

    def __init__(self, folder: Path, binary: Path, gateway_address: str) -> None:
        self._folder = folder
        self._binary = str(binary)
        self._gateway = gateway_address
        port = free_run("127.0.0.1", 3)
        self.edges = [f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"]
        self.picker_address = f"127.0.0.1:{port + 2}"

    def edge(self, number: int) -> ServiceProcess:
        return self._start(f"edge-{number}", "--listen", self.edges[number])

    def picker(self) -> ServiceProcess:
        return self._start(
            "picker",
            *("--listen", "127.0.0.1:0", "--picker-listen", self.picker_address),
            *("--picker-endpoints", ",".join(self.edges)),
        )

    def _start(self, name: str, *flags: str) -> ServiceProcess:
        command = [self._binary, "--backend", self._gateway, "--metrics-listen", "127.0.0.1:0"]
        command += ["--max-body-bytes", str(MAX_BODY), *flags]
        return ServiceProcess(name, command, self._folder)


class Front:
    """Everything from Envoy down to the scripted workers."""

    def __init__(self, http: httpx.AsyncClient, mesh: Harness, pool: Pool) -> None:
        self.http = http
        self.mesh = mesh
        self.pool = pool
        self.urls: dict[str, str] = {}
        self.edges: list[ServiceProcess] = []
        self.picker: ServiceProcess

    async def chat(
        self, mode: str, *, body: bytes | None = None, subset: str = "", **fields: Any
    ) -> httpx.Response:
        data = body or json.dumps({**CHAT, **fields}).encode()
        headers = {"content-type": "application/json", DESTINATION: "192.0.2.1:9"}
        if subset:
            headers[SUBSET] = subset
        url = f"{self.urls[mode]}/v1/chat/completions"
        return await self.http.post(url, content=data, headers=headers)

    async def served(self) -> list[int]:
        """Chats that each edge has had."""
        return [await self._chats(edge) for edge in self.edges]

    async def _chats(self, edge: ServiceProcess) -> int:
        lines = (await self.metrics(edge)).splitlines()
        mine = [one for one in lines if "weft_rest_requests_total" in one and "chat" in one]
        return sum(int(float(one.rsplit(" ", 1)[1])) for one in mine)

    async def metrics(self, process: ServiceProcess) -> str:
        address = (await process.ready())["metrics_address"]
        return (await self.http.get(f"http://{address}/metrics")).text

    async def wait_metric(self, line: str) -> None:
        """Returns once the picker shows a line."""
        async with asyncio.timeout(60):
            while f"{line}\n" not in await self.metrics(self.picker):
                await asyncio.sleep(0.02)


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL}


@asynccontextmanager
async def front(
    folder: Path, binary: Path, *, step_s: float = 0.002, **settings: Any
) -> AsyncIterator[Front]:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[*made.mesh.ids(TEXT), made.mesh.end]])

    (folder / MODEL).mkdir(parents=True, exist_ok=True)
    (folder / MODEL / "chat_template.jinja").write_text(TEMPLATE)
    limits = httpx.Timeout(60)
    async with (
        gateway(folder, script, max_context_tokens=4096, step_s=step_s, **settings) as mesh,
        httpx.AsyncClient(timeout=limits, trust_env=False) as http,
    ):
        pool = Pool(folder, binary, mesh.app.server.address)
        made = Front(http, mesh, pool)
        with ExitStack() as stack:
            made.edges = [stack.enter_context(pool.edge(number)) for number in range(2)]
            for edge in made.edges:
                await edge.ready()
            made.picker = stack.enter_context(pool.picker())
            await made.picker.ready()
            envoy = stack.enter_context(Envoy(folder, [pool.picker_address], pool.edges))
            made.urls = await asyncio.to_thread(envoy.urls)
            await until_status(made, 200)
            yield made


async def until_status(made: Front, status: int) -> None:
    """Returns once both ways answer a cheap request with a status."""
    async with asyncio.timeout(60):
        for mode in MODES:
            url = made.urls[mode]
            while (await made.http.get(f"{url}/v1/models")).status_code != status:
                await asyncio.sleep(0.05)


async def test_answers_come_through_both_edges_unchanged(tmp_path: Path, rest_binary: Path) -> None:
    async with front(tmp_path, rest_binary) as made:
        for mode in MODES:
            before = await made.served()
            for stream in (False, True) * 4:
                answer = await made.chat(mode, stream=stream)
                assert answer.status_code == 200, answer.text
                text = streamed(answer.text) if stream else whole(answer)
                assert text == TEXT
            after = await made.served()
            counts = [now - then for now, then in zip(after, before, strict=True)]
            assert sum(counts) == 8
            assert min(counts) >= 3, counts
        # Bodies of any size up to the bound pass as they are, with what no client would send.
        for mode in MODES:
            for _ in range(3):
                content = random.choice("aé你") * random.randrange(1, 900)
                fields = {"messages": [{"role": "user", "content": content}]}
                padding = " " * random.choice([0, 70_000, MAX_BODY - 10_000])
                body = json.dumps({**fields, "model": MODEL}, indent=1).encode()
                answer = await made.chat(mode, body=padding.encode() + body)
                assert answer.status_code == 200, answer.text
                prompt = made.mesh.tokenizer.decode(made.mesh.workers[0].prompts[-1])
                assert content in prompt
        shown = exposed(await made.metrics(made.picker))
        assert documented()["Endpoint picker"] <= shown


def whole(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["message"]["content"])


def streamed(text: str) -> str:
    events = [one[6:] for one in text.split("\n\n") if one.startswith("data: ")]
    assert events[-1] == "[DONE]"
    deltas = [json.loads(one)["choices"][0]["delta"] for one in events[:-1]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_a_subset_is_kept_to(tmp_path: Path, rest_binary: Path) -> None:
    async with front(tmp_path, rest_binary) as made:
        for mode in MODES:
            for number, address in enumerate(made.pool.edges):
                before = await made.served()
                for _ in range(4):
                    answer = await made.chat(mode, subset=f"192.0.2.7:1,{address}")
                    assert answer.status_code == 200
                after = await made.served()
                assert after[number] - before[number] == 4
                assert after[1 - number] == before[1 - number]
            answer = await made.chat(mode, subset="192.0.2.7:1")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "unavailable"
            assert answer.headers["retry-after"] == "1"


async def test_what_is_wrong_gets_the_gateway_s_own_answer(
    tmp_path: Path, rest_binary: Path
) -> None:
    """Only what is refused for load, or has no bound, is refused by the picker."""
    async with front(tmp_path, rest_binary) as made:
        direct = f"http://{made.pool.edges[0]}/v1/chat/completions"
        wrong = [
            b'{"model": "nobody", "messages": []}',
            b'{"model": "tiny"',
            b"\xff\x00",
            b"[]",
            b'{"model": 5, "messages": [{"role": "user", "content": "hi"}]}',
            b'{"model": "tiny", "messages": "hi"}',
        ]
        for mode in MODES:
            for body in wrong:
                answer = await made.chat(mode, body=body)
                own = await made.http.post(
                    direct, content=body, headers={"content-type": "application/json"}
                )
                assert 400 <= own.status_code < 500
                assert (answer.status_code, answer.json()) == (own.status_code, own.json())
            answer = await made.chat(mode, body=b'{"messages": "' + b"x" * (MAX_BODY + 1))
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "request_too_large"
            assert (await made.chat(mode)).status_code == 200


async def test_load_is_shed_before_the_body_is_sent_on(tmp_path: Path, rest_binary: Path) -> None:
    limits = {"max_running_requests": 1, "max_queued_requests": 1}
    async with front(tmp_path, rest_binary, step_s=0.5, **limits) as made:
        load = made.mesh.app.pipeline.load
        running = [asyncio.create_task(made.chat("duplex", stream=True)) for _ in range(2)]
        await made.mesh.wait(lambda: (load().running_prompts, load().queued_prompts) == (1, 1))
        before = await made.served()
        for mode in MODES:
            answer = await made.chat(mode)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
        assert await made.served() == before
        # Whoever leaves gives the place back, through Envoy and the edge.
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await made.mesh.wait(lambda: load().running_prompts == 0)
        await made.wait_metric("weft_rest_picker_streams 0")


async def test_a_stream_comes_as_it_is_made(tmp_path: Path, rest_binary: Path) -> None:
    async with front(tmp_path, rest_binary, step_s=0.05) as made:
        load = made.mesh.app.pipeline.load
        for mode in MODES:
            url = f"{made.urls[mode]}/v1/chat/completions"
            async with made.http.stream("POST", url, json={**CHAT, "stream": True}) as answer:
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if '"content":"W' in text.replace(" ", ""):
                        break
                assert load().running_prompts == 1  # the rest is still to come
            await made.mesh.wait(lambda: load().running_prompts == 0)


async def test_edges_and_pickers_go_and_come_back(tmp_path: Path, rest_binary: Path) -> None:
    async with front(tmp_path, rest_binary) as made:
        made.edges[0].end()
        await made.wait_metric("weft_rest_picker_endpoints 1")
        for mode in MODES:
            for _ in range(4):
                assert (await made.chat(mode)).status_code == 200
        made.edges[1].end()
        await made.wait_metric("weft_rest_picker_endpoints 0")
        answer = await made.chat("duplex")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        # Without a picker nothing is served past it; Envoy's configuration says with which status.
        made.picker.end()
        await until_status(made, 503)
        with made.pool.edge(0), made.pool.picker():
            await until_status(made, 200)
            assert whole(await made.chat("duplex")) == TEXT


async def test_a_proxy_that_fails_open_serves_without_a_picker(
    tmp_path: Path, rest_binary: Path
) -> None:
    """agentgateway#3473: it answers 500."""
    async with front(tmp_path, rest_binary, step_s=0.05) as made:
        url = f"{made.urls[FAILS_OPEN]}/v1/chat/completions"
        async with made.http.stream("POST", url, json={**CHAT, "stream": True}) as running:
            assert running.status_code == 200
            # In the middle of an answer, without a word.
            made.picker.send(signal.SIGKILL)
            assert made.picker.wait() == -signal.SIGKILL
            assert streamed((await running.aread()).decode()) == TEXT
        await until_status(made, 503)
        before = await made.served()
        for stream in (False, True) * 4:
            answer = await made.chat(FAILS_OPEN, stream=stream)
            assert answer.status_code == 200, answer.text
            assert (streamed(answer.text) if stream else whole(answer)) == TEXT
        after = await made.served()
        # A client's own header chooses nobody, and edges take turns.
        assert min(now - then for now, then in zip(after, before, strict=True)) >= 2


# -- the whole mesh ------------------------------------------------------------------------------

NUM_CHATS, NUM_TURNS, NUM_NEW = 6, 3, 12


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[TinyMesh]:
    mesh = TinyMesh(tmp_path, "--decode", "2", "--local-prefill-max-tokens", "0")
    try:
        mesh.wait_ready()
        yield mesh
    finally:
        mesh.stop()


@pytest.mark.full
def test_routing_stays_exact_behind_envoy(
    tmp_path: Path, rest_binary: Path, mesh: TinyMesh
) -> None:
    """Each turn of a chat finds all full pages of the turn before, whichever edge it comes by."""
    address = mesh.service("gateway")["address"]
    pool = Pool(tmp_path, rest_binary, address)
    with ExitStack() as stack:
        edges = [stack.enter_context(pool.edge(number)) for number in range(2)]
        for edge in edges:
            edge.wait_ready()
        stack.enter_context(pool.picker()).wait_ready()
        envoy = stack.enter_context(Envoy(tmp_path, [pool.picker_address], pool.edges))
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
        urls = [*envoy.urls().values()]
        while client.get(f"{urls[0]}/v1/models").status_code != 200:
            pass
        chats = [[random.randrange(VOCAB) for _ in range(64)] for _ in range(NUM_CHATS)]
        known = [0] * NUM_CHATS
        for _ in range(NUM_TURNS):
            for number in random.sample(range(NUM_CHATS), NUM_CHATS):
                chat = chats[number]
                body = {
                    **{"model": "tiny", "prompt": chat, "max_tokens": NUM_NEW},
                    **{"ignore_eos": True, "return_token_ids": True},
                }
                answer = client.post(f"{random.choice(urls)}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                found = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert found >= known[number] // 16 * 16
                chat += answer.json()["choices"][0]["token_ids"]
                known[number] = len(chat) - 1  # K and V of the last token are not there yet
                chat += [random.randrange(VOCAB) for _ in range(20)]
            mesh.wait_idle()
            mesh.wait_indexed()


# -- the contract --------------------------------------------------------------------------------

READ = """
import importlib, json, sys
from google.protobuf import descriptor_pb2
names = json.loads(sys.argv[1])
found = {}
def walk(message):
    found[message.full_name.rsplit(".", 1)[-1]] = {
        field.name: [field.number, field.type, field.is_repeated] for field in message.fields
    }
    for enum in message.enum_types:
        found[enum.name] = {value.name: [value.number] for value in enum.values}
    for nested in message.nested_types:
        walk(nested)
for name in names:
    for message in importlib.import_module(name).DESCRIPTOR.message_types_by_name.values():
        walk(message)
    for enum in importlib.import_module(name).DESCRIPTOR.enum_types_by_name.values():
        found[enum.name] = {value.name: [value.number] for value in enum.values}
print(json.dumps(found))
"""
PUBLISHED = (
    "envoy.service.ext_proc.v3.external_processor_pb2",
    "envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2",
    "envoy.config.core.v3.base_pb2",
    "envoy.type.v3.http_status_pb2",
)
ENUM = 14


def descriptors(modules: tuple[str, ...], *paths: Path) -> dict[str, dict[str, list[Any]]]:
    """Fields and values by the names of messages and enums, read in a process of its own: both
    contracts have the same names.
    """
    before = f"import sys; sys.path[:0] = {[str(path) for path in paths]!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", before + READ, json.dumps(modules)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, list[Any]]] = json.loads(done.stdout)
    return found


def test_the_contract_is_a_part_of_the_published_one() -> None:
    published = descriptors(PUBLISHED, TOOLS)
    own = descriptors(("weft.extproc.external_processor_pb2",))
    assert len(own) > 15
    for name, fields in own.items():
        for field, facts in fields.items():
            told = published[name][field]
            # 200 and so on are an enum there, and any number here.
            is_code = (name, field) == ("HttpStatus", "code")
            assert facts == told or (is_code and told[:2] == [facts[0], ENUM]), (name, field)
