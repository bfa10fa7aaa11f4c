"""A decode worker of two hosts that loses one, or the network between them, while it answers: its
requests go on elsewhere with the same tokens, its processes end on all hosts, and it comes back.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import psutil
import pytest
from weft.cli.up.ports import free_ports
from weft.testing.engine.host_network import Network
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE, VOCAB, Greedy
from weft.testing.models.tiny_models import make_tiny
from weft.testing.services.processes import ServiceProcess
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

NUM_HOSTS, NUM_STREAMS, NUM_TOKENS, LIMIT_S, END_S = 2, 6, 400, 10.0, 60.0
WEFT = (sys.executable, "-m", "weft.cli", "serve")


class HostsMesh:
    """A worker of two hosts with two ranks each, in namespaces, one of a process, and a gateway."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self.network = Network(NUM_HOSTS, stack)
        if not self.network.has_namespaces:
            pytest.skip("this machine allows no network namespaces")
        shape = SHAPE | {"num_hidden_layers": NUM_HOSTS, "max_position_embeddings": 2048}
        self.model_dir = make_tiny(
            "llama", folder / MODEL, random.randrange(2**31), tokenizer=True, **shape
        )
        (self._port,) = free_ports("127.0.0.1", 1)
        self._model = ("--model-dir", str(self.model_dir), "--model-name", MODEL)
        self.hosts: list[ServiceProcess] = []
        self.start_hosts()
        command = [*WEFT, "decode", *self._model, *self._flags(self.network.of_tests), "--port=0"]
        other = self._start("other", command).wait_ready(240)["address"]
        self.first_id = self.hosts[0].wait_ready(240)["worker_id"]
        command = [*WEFT, "gateway", *self._model, "--port", "0", "--decode-policy", "round_robin"]
        command += ["--stale-after-s", "20"]  # A busy machine makes nobody stale.
        command += ["--decode", f"{self.network.address(0)}:{self._port}", "--decode", other]
        self.gateway: str = self._start("gateway", command).wait_ready(60)["address"]

    def _flags(self, address: str) -> list[str]:
        flags = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--insecure"]
        return [*flags, "--host", address, "--rank-timeout-s", str(LIMIT_S)]

    def _start(self, name: str, command: list[str]) -> ServiceProcess:
        return self._stack.enter_context(ServiceProcess(name, command, self._folder))

    def start_hosts(self) -> None:
        """In any order."""
        at = f"{self.network.address(0)}:{self.network.port}"
        started = {}
        for host in random.sample(range(NUM_HOSTS), NUM_HOSTS):
            command = [*self.network.before(host), *WEFT, "decode", *self._model]
            command += [*self._flags(self.network.address(host)), "--port", str(self._port)]
            command += ["--pp", str(NUM_HOSTS), "--hosts", str(NUM_HOSTS), "--rendezvous", at]
            command += ["--tp", "2"]
            name = f"host-{host}"
            started[host] = self._start(name, [*command, "--host-rank", str(host)])
        self.hosts = [started[host] for host in range(NUM_HOSTS)]

    def family(self, host: int) -> list[psutil.Process]:
        process = psutil.Process(self.hosts[host].pid)
        return [process, *process.children(recursive=True)]


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostsMesh]:
    with ExitStack() as stack:
        yield HostsMesh(tmp_path_factory.mktemp("losses"), stack)


@pytest.fixture(scope="module")
def greedy(mesh: HostsMesh) -> Greedy:
    return Greedy(mesh.model_dir)


class Streams:
    """Streams of random prompts through the gateway, all at once."""

    def __init__(self, mesh: HostsMesh) -> None:
        self._mesh = mesh
        lengths = random.sample(range(5, 120), NUM_STREAMS)
        self._prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in lengths]
        self._found: list[list[int]] = [[] for _ in self._prompts]
        self.owners: list[str] = []
        self.lost: list[common_pb2.LostAttempt] = []

    async def run(self, act: Callable[[], None] = lambda: None) -> None:
        """Reads all streams to their ends, and calls `act` once each has brought some tokens."""
        async with grpc.aio.insecure_channel(self._mesh.gateway) as channel:
            stub: gateway_pb2_grpc.GatewayServiceAsyncStub
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            streams = [self._stream(stub, number) for number in range(NUM_STREAMS)]
            await asyncio.gather(*streams, self._act(act))

    async def _act(self, act: Callable[[], None]) -> None:
        while min(map(len, self._found)) < 3:
            await asyncio.sleep(0.005)
        act()

    async def _stream(self, stub: gateway_pb2_grpc.GatewayServiceAsyncStub, number: int) -> None:
        request = gateway_pb2.CompleteRequest(
            model=MODEL,
            token_ids=common_pb2.TokenIds(ids=self._prompts[number]),
            sampling=common_pb2.SamplingParams(temperature=0.0),
            stop=common_pb2.StopCriteria(max_tokens=NUM_TOKENS, ignore_eos=True),
            stream=True,
        )
        async for message in stub.Complete(request, timeout=240):
            for choice in message.choices:
                self._found[number] += choice.token_ids
            if message.HasField("timeline"):
                self.owners.append(message.timeline.worker_id)
                self.lost += message.timeline.lost_attempts

    def check(self, greedy: Greedy) -> None:
        for prompt, found in zip(self._prompts, self._found, strict=True):
            greedy.check(prompt, found, NUM_TOKENS)


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


STRIKES = (
    *("stop 0", "stop 1", "cut", "kill rank 0", "kill rank 1"),
    *("kill engine 0", "kill 0", "kill 1"),
)


@pytest.mark.parametrize("strike", STRIKES)
def test_requests_go_on_when_a_host_is_lost_or_stops(
    strike: str, mesh: HostsMesh, greedy: Greedy, seed: int
) -> None:
    families = [mesh.family(host) for host in range(NUM_HOSTS)]
    kind, host = strike.rsplit(maxsplit=1) if " " in strike else (strike, "1")
    struck = families[int(host)]

    def act() -> None:
        if kind == "cut":
            mesh.network.cut(1)
        elif kind in ("kill engine", "kill rank"):
            struck[1 if kind == "kill engine" else -1].kill()
        else:
            for process in struck:
                process.send_signal(signal.SIGSTOP if kind == "stop" else signal.SIGKILL)

    streams = Streams(mesh)
    asyncio.run(streams.run(act))
    streams.check(greedy)
    assert streams.lost, "it came too late to show anything"
    left = [one for family in families for one in family if kind != "stop" or one not in struck]
    wait_until(lambda: all(map(has_ended, left)), END_S, lambda: str(left))
    for process in struck:
        if not has_ended(process):
            process.kill()
    if kind == "cut":
        mesh.network.uncut(1)
    for process in mesh.hosts:
        process.end()
    mesh.start_hosts()
    mesh.first_id = mesh.hosts[0].wait_ready(240)["worker_id"]
    again: list[str] = []

    def serves_again() -> bool:
        streams = Streams(mesh)
        asyncio.run(streams.run())
        streams.check(greedy)
        again[:] = streams.owners
        return mesh.first_id in again

    wait_until(serves_again, 120, lambda: str(again))
