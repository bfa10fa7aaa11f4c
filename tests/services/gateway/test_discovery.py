"""Discovery: workers come and go while a gateway runs, and no source's failure takes any away."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from weft.cli.certs import files_of
from weft.common.kubernetes import ApiServer, api_server
from weft.common.settings import load_settings
from weft.contract.errors import ConfigError
from weft.gateway.fleet.discovery import Discovery, Endpoint, make_discovery
from weft.gateway.fleet.discovery.dns import DnsDiscovery
from weft.gateway.fleet.discovery.file import FileDiscovery
from weft.gateway.fleet.discovery.kubernetes import KubernetesDiscovery
from weft.gateway.settings import GatewaySettings
from weft.testing.services.certificates import make_certificates
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2

TIMEOUT_S = 60.0


class Follower:
    """What a discovery says, as it comes."""

    def __init__(self, discovery: Discovery) -> None:
        self.lists: list[set[str]] = []
        self._task = asyncio.create_task(self._follow(discovery))

    async def _follow(self, discovery: Discovery) -> None:
        async for endpoints in discovery.watch():
            self.lists.append({f"{e.role} {e.address}" for e in endpoints})

    async def wait(self, *expected: str) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self.lists or self.lists[-1] != set(expected):
                assert not self._task.done(), self._task
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@asynccontextmanager
async def following(discovery: Discovery) -> AsyncIterator[Follower]:
    follower = Follower(discovery)
    try:
        yield follower
    finally:
        await follower.end()


# DNS


async def test_every_address_of_a_name_is_a_worker() -> None:
    answers: dict[str, list[str] | None] = {"d": ["10.0.0.2", "10.0.0.1"], "p": ["fd00::1"]}

    async def resolve(host: str, port: int) -> Sequence[str]:
        if (found := answers[host]) is None:
            raise socket.gaierror(socket.EAI_AGAIN, "later")
        return found

    discovery = DnsDiscovery(["d:50052"], ["p:50053"], 0.02, resolve)
    one, two = "decode 10.0.0.1:50052", "decode 10.0.0.2:50052"
    prefill = "prefill [fd00::1]:50053"
    async with following(discovery) as follower:
        await follower.wait(one, two, prefill)
        answers["d"] = ["10.0.0.1", "10.0.0.2", "10.0.0.1"]  # turned round and repeated: no change
        await asyncio.sleep(0.2)
        assert len(follower.lists) == 1
        answers["d"] = None
        answers["p"] = ["fd00::1", "fd00::2"]
        await follower.wait(one, two, prefill, "prefill [fd00::2]:50053")
        answers["d"] = ["10.0.0.3"]
        await follower.wait("decode 10.0.0.3:50052", prefill, "prefill [fd00::2]:50053")


async def test_the_systems_resolver_is_asked() -> None:
    async with following(DnsDiscovery(["localhost:50052"], [], 60)) as follower:
        async with asyncio.timeout(TIMEOUT_S):
            while not follower.lists:
                await asyncio.sleep(0.02)
        known = {"decode 127.0.0.1:50052", "decode [::1]:50052"}
        assert follower.lists[0]
        assert follower.lists[0] <= known
    async with following(DnsDiscovery(["nobody.invalid:50052"], [], 60)) as follower:
        await follower.wait()


# A file


def replace_file(path: Path, content: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(content)
    temporary.replace(path)


async def test_a_file_may_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "workers.toml"
    path.write_text('decode = ["h1:1", "h1:1"]\nprefill = ["h2:2"]\n')
    async with following(FileDiscovery(path, 0.02)) as follower:
        await follower.wait("decode h1:1", "prefill h2:2")
        replace_file(path, 'decode = ["h1:1", "[::1]:3"]')
        await follower.wait("decode h1:1", "decode [::1]:3")
        for broken in ('decode = ["h1"]', "decode = [", 'decoders = ["h1:1"]', "\udcff"):
            count = len(caplog.records)
            temporary = path.with_suffix(".new")
            temporary.write_bytes(broken.encode(errors="surrogateescape"))
            temporary.replace(path)
            async with asyncio.timeout(TIMEOUT_S):
                while not any(
                    "known workers are kept" in record.message for record in caplog.records[count:]
                ):
                    await asyncio.sleep(0.02)
        path.unlink()
        await asyncio.sleep(0.2)
        assert len(follower.lists) == 2
        replace_file(path, "")
        await follower.wait()


def test_a_file_must_be_good_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        FileDiscovery(tmp_path / "none.json", 1)
    path = tmp_path / "workers.json"
    path.write_text('{"decode": ["h1:99999"]}')
    with pytest.raises(ConfigError, match=r"decode: .*not host:port"):
        FileDiscovery(path, 1)


def is_there(mesh: Harness) -> bool:
    sessions = [worker.session for worker in mesh.app.fleet.workers("decode")]
    return any(session is not None and session.is_open for session in sessions)


class FailingDiscovery:
    """Fails in a way that no source expects, after it has named what it knows."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.num_failed = 0

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        if not self.addresses:
            await asyncio.sleep(0.1)
        if self.addresses:
            yield tuple(Endpoint("decode", address) for address in self.addresses)
        self.num_failed += 1
        raise AttributeError("a defect")


async def test_a_source_that_fails_takes_no_worker_away_and_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[65]])

    monkeypatch.setattr("weft.gateway.fleet.fleet._WATCH_AGAIN_S", 0.1)
    discovery = FailingDiscovery()
    async with gateway(tmp_path, script, discovery=discovery, wait=False) as mesh:
        await mesh.wait(lambda: discovery.num_failed > 0)
        discovery.addresses = [mesh.workers[0].address]
        await mesh.wait(lambda: is_there(mesh))
        num_failed = discovery.num_failed
        await mesh.wait(lambda: discovery.num_failed > num_failed + 2)
        request = gateway_pb2.CompleteRequest(text="hello")
        assert [message async for message in mesh.typed.Complete(request)]


async def test_a_running_gateway_follows_a_file(tmp_path: Path) -> None:
    """Requests go to workers that are listed now; a new one takes over without a restart."""

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[65]])

    path = tmp_path / "workers.json"
    path.write_text(json.dumps({"decode": []}))
    settings = GatewaySettings(
        model_dir=tmp_path, discovery="file", discovery_file=path, discovery_interval_s=0.1
    )
    discovery = make_discovery(settings)
    async with gateway(tmp_path, script, discovery=discovery, wait=False) as mesh:
        first = mesh.workers[0]
        second = FakeWorker(MODEL, first.vocabulary_size, script, worker_id="decode-9")
        address = await second.start()
        try:
            for worker, listed in ((first, first.address), (second, address)):
                replace_file(path, json.dumps({"decode": [listed]}))

                async def sees_only(expected: str = listed) -> bool:
                    fleet = await mesh.typed.GetFleet(gateway_pb2.GetFleetRequest())
                    return [(w.address, w.healthy) for w in fleet.workers] == [(expected, True)]

                async with asyncio.timeout(TIMEOUT_S):
                    while not await sees_only():
                        await asyncio.sleep(0.05)
                before = len(worker.submits)
                request = gateway_pb2.CompleteRequest(text="hello")
                assert [message async for message in mesh.typed.Complete(request)]
                assert len(worker.submits) == before + 1
        finally:
            await second.stop()


# Kubernetes


def endpoint_slice(
    name: str, service: str, addresses: Sequence[str], port: int, version: int, **more: Any
) -> dict[str, Any]:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "labels": {"kubernetes.io/service-name": service},
            "resourceVersion": str(version),
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], **more} for address in addresses],
        "ports": [{"name": "metrics", "port": 9}, {"name": "grpc", "port": port}],
    }


def _answer(writer: asyncio.StreamWriter, status: str, body: bytes) -> None:
    head = f"HTTP/1.1 {status}\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


class FakeApi:
    """An API server over HTTPS whose answers a test writes."""

    def __init__(self, folder: Path) -> None:
        make_certificates(folder, "rest")
        files = files_of(folder, "rest")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(files.cert, files.key)
        self.ca = files.ca
        self.token = folder / "token"
        self.token.write_text("secret-1\n")
        self.items: list[dict[str, Any]] = []
        self.version = 1
        self.status = 200
        self.requests: list[str] = []
        self.tokens: list[str] = []
        self._watches: set[asyncio.Queue[dict[str, Any] | None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        return f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    def send(self, kind: str, item: dict[str, Any]) -> None:
        for watch in self._watches:
            watch.put_nowait({"type": kind, "object": item})

    def cut(self) -> None:
        """Ends all watches."""
        for watch in self._watches:
            watch.put_nowait(None)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.split(" ")[1])
            lines = [line for line in head.split("\r\n") if line.lower().startswith("authoriz")]
            self.tokens.append(lines[0].split(" ")[-1])
            if self.status != 200:
                _answer(writer, f"{self.status} No", b"")
            elif "watch=1" not in head:
                listed = {"metadata": {"resourceVersion": str(self.version)}, "items": self.items}
                _answer(writer, "200 OK", json.dumps(listed).encode())
            else:
                await self._watch(writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _watch(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n")
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._watches.add(queue)
        try:
            while (event := await queue.get()) is not None:
                line = json.dumps(event).encode() + b"\n"
                writer.write(b"%x\r\n%b\r\n" % (len(line), line))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        finally:
            self._watches.discard(queue)

    async def watched(self) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self._watches:
                await asyncio.sleep(0.02)


@asynccontextmanager
async def kubernetes(folder: Path) -> AsyncIterator[tuple[FakeApi, KubernetesDiscovery]]:
    api = FakeApi(folder)
    url = await api.start()
    server = ApiServer(url=url, namespace="weft", token_file=api.token, ca_file=api.ca)
    try:
        yield api, KubernetesDiscovery(server, ["weft-decode:grpc"], ["weft-prefill:grpc"])
    finally:
        await api.stop()


async def test_endpoint_slices_are_listed_and_watched(tmp_path: Path) -> None:
    async with kubernetes(tmp_path) as (api, discovery):
        api.items = [
            endpoint_slice("d-1", "weft-decode", ["10.0.0.1", "10.0.0.2"], 50052, 5),
            endpoint_slice("p-1", "weft-prefill", ["10.0.1.1"], 50053, 6),
            {**endpoint_slice("x", "weft-decode", [], 1, 7), "endpoints": None, "ports": None},
        ]
        api.version = 7
        one, two = "decode 10.0.0.1:50052", "decode 10.0.0.2:50052"
        prefill = "prefill 10.0.1.1:50053"
        async with following(discovery) as follower:
            await follower.wait(one, two, prefill)
            await api.watched()
            path, _, query = api.requests[-1].partition("?")
            assert path == "/apis/discovery.k8s.io/v1/namespaces/weft/endpointslices"
            assert "resourceVersion=7" in query
            assert "weft-decode" in query
            assert "weft-prefill" in query
            # A pod that ends is kept while its slice has it: it may still be answering.
            leaving = {"conditions": {"ready": False, "serving": True, "terminating": True}}
            api.send(
                "ADDED", endpoint_slice("d-2", "weft-decode", ["10.0.0.3"], 50052, 8, **leaving)
            )
            await follower.wait(one, two, prefill, "decode 10.0.0.3:50052")
            api.send("MODIFIED", endpoint_slice("d-1", "weft-decode", ["10.0.0.2"], 50052, 9))
            await follower.wait(two, prefill, "decode 10.0.0.3:50052")
            api.send("DELETED", endpoint_slice("d-2", "weft-decode", [], 50052, 10))
            await follower.wait(two, prefill)
            api.send("BOOKMARK", {"metadata": {"resourceVersion": "99"}})
            # The watch ends, as all do: the next one goes on from the bookmark.
            api.token.write_text("secret-2\n")
            api.cut()
            async with asyncio.timeout(TIMEOUT_S):
                while "resourceVersion=99" not in api.requests[-1]:
                    await asyncio.sleep(0.02)
            assert (api.tokens[0], api.tokens[-1]) == ("secret-1", "secret-2")
            assert len(follower.lists) == 4


async def test_failures_of_the_api_take_no_worker_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kubernetes(tmp_path) as (api, discovery):
        api.items = [endpoint_slice("d-1", "weft-decode", ["10.0.0.1"], 50052, 5)]
        async with following(discovery) as follower:
            await follower.wait("decode 10.0.0.1:50052")
            await api.watched()
            # Too old, told in the stream: all is listed again.
            api.items = [endpoint_slice("d-1", "weft-decode", ["10.0.0.2"], 50052, 6)]
            api.send("ERROR", {"kind": "Status", "code": 410})
            await follower.wait("decode 10.0.0.2:50052")
            for status in (403, 500):
                await api.watched()
                api.status = status
                seen = len(api.requests)
                api.cut()
                async with asyncio.timeout(TIMEOUT_S):
                    while len(api.requests) < seen + 3:
                        await asyncio.sleep(0.02)
                assert f"answered {status}" in caplog.text
                api.status = 200
            # Too old, told at the start of a watch.
            await api.watched()
            api.status = 410
            seen = len(api.requests)
            api.cut()
            async with asyncio.timeout(TIMEOUT_S):
                while len(api.requests) == seen:
                    await asyncio.sleep(0.02)
            api.items = [endpoint_slice("d-1", "weft-decode", ["10.0.0.3"], 50052, 9)]
            api.status = 200
            await follower.wait("decode 10.0.0.3:50052")
            assert len(follower.lists) == 3
        assert "list and watch of endpointslices" in caplog.text
        assert "secret-1" not in caplog.text


async def test_an_api_server_of_another_authority_is_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with kubernetes(tmp_path) as (api, _):
        other = tmp_path / "other"
        make_certificates(other, "rest")
        assert api._server is not None
        port = api._server.sockets[0].getsockname()[1]
        server = ApiServer(
            url=f"https://127.0.0.1:{port}",
            namespace="weft",
            token_file=api.token,
            ca_file=other / "ca.pem",
        )
        async with following(KubernetesDiscovery(server, ["weft-decode:grpc"], [])):
            async with asyncio.timeout(TIMEOUT_S):
                while "CERTIFICATE_VERIFY_FAILED" not in caplog.text:
                    await asyncio.sleep(0.02)
        assert not api.tokens  # it never saw the token


def test_where_the_api_server_is(tmp_path: Path) -> None:
    (tmp_path / "namespace").write_text("prod")
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    assert api_server(environ, account=tmp_path) == ApiServer(
        url="https://[fd00::1]:443",
        namespace="prod",
        token_file=tmp_path / "token",
        ca_file=tmp_path / "ca.crt",
    )
    with pytest.raises(ConfigError, match="--kubernetes-api"):
        api_server({}, account=tmp_path)
    with pytest.raises(ConfigError, match="--kubernetes-namespace"):
        api_server(environ, account=tmp_path / "none")
    server = ApiServer(url="u", namespace="n", token_file=tmp_path / "t", ca_file=tmp_path / "c")
    with pytest.raises(ConfigError, match="No such file"):
        KubernetesDiscovery(server, ["a:grpc"], [])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no decode worker"),
        (["--discovery", "dns"], "no decode worker"),
        (["--discovery", "file"], "needs --discovery-file"),
        (["--discovery", "file", "--discovery-file", "f", "--decode", "h:1"], "the file has"),
        (["--discovery", "kubernetes", "--decode", "weft-decode:50052"], "PORT a name"),
        (["--discovery", "kubernetes", "--decode", "weft-decode.other:grpc"], "SERVICE:PORT"),
        (["--discovery", "dns", "--decode", "weft-decode:grpc"], "not host:port"),
    ],
)
def test_settings_fit_the_source(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load_settings(GatewaySettings, ["--model-dir", "m", *flags], {})
    assert message in capsys.readouterr().err
