"""A mesh as a user starts it: `weft up` on free ports, with real services and a real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import grpc
import httpx
import psutil
from weft.cli.up.ports import free_run
from weft.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)

WEFT = [sys.executable, "-m", "weft.cli"]
MODEL = "smollm2-135m-instruct"
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
PATIENCE = 4
"""Times as long as a wait should take: machines that run tests are slow at times."""


class LocalMesh:
    """A running `weft up`.

    Args:
        folder: For state, logs and what it prints.
        flags: Of `weft up`; workers run on the CPU unless a device is named.
        gateways: How many, each with its REST edge.
    """

    model = MODEL
    """Name of the model in requests."""
    is_tiny = False
    """Whether a thread an engine is enough."""
    program: ClassVar = WEFT
    """The command that it is started by, without `up`."""

    def __init__(self, folder: Path, *flags: str, gateways: int = 1) -> None:
        port = free_run("127.0.0.1", 2 * gateways)
        rest_port, grpc_port = port, port + gateways
        self.rest_addresses = [f"127.0.0.1:{rest_port + index}" for index in range(gateways)]
        self.grpc_addresses = [f"127.0.0.1:{grpc_port + index}" for index in range(gateways)]
        self.rest_address, self.grpc_address = self.rest_addresses[0], self.grpc_addresses[0]
        self.url = f"http://{self.rest_address}"
        self.state = folder / "state"
        self.output = folder / "up.txt"
        ports = ["--rest-port", str(rest_port), "--grpc-port", str(grpc_port)]
        ports += ["--gateways", str(gateways)]
        if "--device" not in flags:
            ports += ["--device", "cpu"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*self.program, "up", *ports, "--state-dir", str(self.state), *flags],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment(),
            )

    def environment(self) -> dict[str, str]:
        environment = {**os.environ, "NO_COLOR": "1"}
        if not self.is_tiny:  # Engines take the cores that they find.
            environment.pop("OMP_NUM_THREADS", None)
        return environment

    @property
    def text(self) -> str:
        """Everything that it has printed."""
        return self.output.read_text(errors="replace")

    def wait_ready(self) -> None:
        """Returns once `/readyz` says 200."""
        wait_until(self._is_ready, READY_TIMEOUT_S, lambda: self.text)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, self.text
        # Asked many times a second: certificates that nobody needs would be read each time.
        options: dict[str, Any] = {"timeout": 5, "trust_env": False, "verify": False}
        try:
            answers = [
                httpx.get(f"http://{address}/readyz", **options) for address in self.rest_addresses
            ]
        except httpx.TransportError:
            return False
        return all(answer.status_code == 200 for answer in answers)

    def stop(self) -> int:
        """Ends it as Ctrl-C does; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # and everything else dies with it
            self.process.wait()
            raise AssertionError(f"weft up did not end:\n{self.text}") from None

    def family(self) -> list[psutil.Process]:
        """Every process of the mesh except the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ready_file(self, name: str) -> dict[str, Any] | None:
        """Content of a service's ready file; None if it does not exist."""
        try:
            content: dict[str, Any] = json.loads((self.state / "run" / f"{name}.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return content

    def service(self, name: str) -> dict[str, Any]:
        """Content of a service's ready file, which must exist."""
        content = self.ready_file(name)
        assert content is not None, f"{name} is not ready:\n{self.text}"
        return content

    def names(self, role: str) -> list[str]:
        """Names of the workers of a role."""
        return sorted(path.stem for path in (self.state / "run").glob(f"{role}-*.json"))

    def log(self, name: str) -> str:
        return (self.state / "logs" / f"{name}.log").read_text(errors="replace")

    @contextmanager
    def serving(self) -> Iterator[Self]:
        """Waits until it serves. At the end it must stop without an error."""
        try:
            self.wait_ready()
            self.wait_healthy()
            yield self
            assert self.stop() == 0, self.text
        finally:
            self.process.kill()
            self.process.wait()

    @contextmanager
    def worker(self, name: str) -> Iterator[worker_pb2_grpc.WorkerServiceStub]:
        """Stub of a worker's own service."""
        with grpc.insecure_channel(self.service(name)["address"]) as channel:
            yield worker_pb2_grpc.WorkerServiceStub(channel)

    def dump(self, name: str) -> Any:
        """A service's state, by its operators' port."""
        request = admin_pb2.DumpStateRequest()
        with self.operators(name) as (stub, metadata):
            for _ in range(PATIENCE):
                try:
                    return json.loads(stub.DumpState(request, metadata=metadata, timeout=30).state)
                except grpc.RpcError as error:
                    # Its engine computes a step for longer than its server waits for it.
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
        raise AssertionError(f"the engine of {name} does not answer:\n{self.log(name)}")

    @contextmanager
    def operators(self, name: str) -> Iterator[tuple[Any, tuple[tuple[str, str], ...]]]:
        """A service's AdminService, and the metadata that it wants."""
        token = (self.state / "admin-token").read_text().strip()
        with grpc.insecure_channel(self.service(name)["admin_address"]) as channel:
            metadata = (("authorization", f"Bearer {token}"),)
            yield admin_pb2_grpc.AdminServiceStub(channel), metadata

    def load(self, name: str) -> worker_pb2.WatchLoadResponse:
        """A worker's load as its engine reported it last: ten times a second, and at a dump."""
        with self.worker(name) as stub:
            call = stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=60)
            load = next(iter(call))
            call.cancel()
        return load

    def load_now(self, name: str) -> worker_pb2.WatchLoadResponse:
        """A worker's load; waits for the end of its engine's step."""
        self.dump(name)
        return self.load(name)

    def wait_counted(self) -> None:
        """Returns once the gateway has counted all requests, whose clients know of their ends
        before."""
        wait_until(lambda: not self.dump("gateway")["requests"], 30)

    def num_quarantined(self, name: str) -> int:
        """Pages of a worker's pool, or before one on a GPU, that a lost filler may still write."""
        engine = self.dump(name)["engine"]
        staging = engine["staging_pages"]
        return int(engine["pages"]["quarantined"] + (staging["quarantined"] if staging else 0))

    def counters(self, name: str) -> dict[str, int]:
        """A worker's counters since its start, as it reported them last."""
        return dict(self.load(name).counters)

    def is_idle(self, name: str) -> bool:
        """Whether nothing runs, waits or is filled, and no page is lost or in quarantine."""
        load = self.load(name)
        requests = load.running_requests + load.waiting_requests + load.filling_requests
        return not requests and load.free_pages + load.cached_pages == load.total_pages

    def wait_healthy(self) -> None:
        """Returns once every gateway sees all its workers healthy."""
        fleet: list[gateway_pb2.FleetWorker] = []

        def is_healthy() -> bool:
            fleet[:] = stub.GetFleet(gateway_pb2.GetFleetRequest(), timeout=60).workers
            return all(worker.healthy for worker in fleet)

        for address in self.grpc_addresses:
            with grpc.insecure_channel(address) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                wait_until(is_healthy, 60, lambda: str(fleet))

    def wait_idle(self) -> None:
        """Returns once all workers are idle."""
        workers = [name for role in ("prefill", "decode", "worker") for name in self.names(role)]
        wait_until(
            lambda: all(self.is_idle(name) for name in workers),
            30,
            lambda: "\n".join(f"{name}: {self.load(name)}" for name in workers),
        )

    def wait_indexed(self) -> None:
        """Returns once the gateway knows of all pages that workers hold; it has an index a role."""
        address = self.service("gateway")["metrics_address"]
        indexes = {"prefill": 1, "decode": 1, "worker": 2}

        def is_whole() -> bool:
            held = sum(
                count * self.load(name).cached_pages
                for role, count in indexes.items()
                for name in self.names(role)
            )
            lines = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
            (line,) = [one for one in lines if one.startswith("weft_kv_index_pages ")]
            return float(line.split()[1]) == held

        wait_until(is_whole, 30)


def ownerless_shared_memory() -> set[str]:
    """Names of the shared memory on this machine that no process has mapped.

    Without what comes and goes at once: tests and meshes that run beside this one make some.
    """
    before = _unmapped()
    time.sleep(0.1)
    return before & _unmapped()


def _unmapped() -> set[str]:
    names = set(os.listdir("/dev/shm"))
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        try:
            text = maps.read_text()
        except OSError:  # it has ended
            continue
        mapped = {line.rpartition("/dev/shm/")[2] for line in text.splitlines()}
        names -= {name.removesuffix(" (deleted)") for name in mapped}
    return names


def wait_until(
    condition: Callable[[], object],
    timeout_s: float,
    explain: Callable[[], str] | str | None = None,
) -> float:
    """Waits for something, `PATIENCE` times as long at most; the seconds it took.

    Raises:
        AssertionError: It did not come; says what `explain` is or returns.
    """
    start_s, pause_s = time.monotonic(), 0.02
    while not condition():
        if time.monotonic() - start_s > PATIENCE * timeout_s:
            told = explain() if callable(explain) else explain
            raise AssertionError(f"not within {timeout_s} s: {told or condition}")
        # What is waited for long needs the cores that asking takes.
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.2)
    return time.monotonic() - start_s
