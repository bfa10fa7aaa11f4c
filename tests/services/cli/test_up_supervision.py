"""The supervisor of `weft up` over real processes: restarts, proofs of death, a clean end."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.cli.up.process import ServiceProcess, ServiceSpec
from weft.cli.up.supervisor import RestartBackoff
from weft.common.rpc.server import SECOND_SIGNAL_AFTER_S
from weft.testing.services.fake_service import is_alive

FAKE_MESH = "weft.testing.services.fake_mesh"
WORKERS = ("decode-0:worker", "prefill-0:worker", "gateway")


class Mesh:
    """A supervisor with fake services, and what they wrote down."""

    def __init__(self, folder: Path, *services: str) -> None:
        self.folder = folder
        self._record = folder / "record.jsonl"
        self.process = subprocess.Popen([sys.executable, "-m", FAKE_MESH, str(folder), *services])

    def entries(self) -> list[dict[str, Any]]:
        if not self._record.exists():
            return []
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    def until(self, wanted: Callable[[dict[str, Any]], bool], count: int = 1) -> dict[str, Any]:
        """The count-th entry that is wanted, as soon as it is there."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [entry for entry in self.entries() if wanted(entry)]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.05)
        raise AssertionError(f"never happened; record: {self.entries()}")

    def ready(self) -> None:
        self.until(lambda e: e.get("event") == "mesh ready")

    def started(self, name: str, count: int = 1) -> dict[str, Any]:
        """What the service wrote at its count-th start."""
        return self.until(lambda e: e.get("start") == name, count)

    def pids(self) -> list[int]:
        """Every process that ever was a service or an engine."""
        starts = [entry for entry in self.entries() if "start" in entry]
        engines = [entry["engine_pid"] for entry in starts if "engine_pid" in entry]
        return [entry["pid"] for entry in starts] + engines

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(120)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Mesh]]:
    meshes: list[Mesh] = []

    def start_mesh(*services: str) -> Mesh:
        meshes.append(Mesh(tmp_path, *services))
        return meshes[-1]

    yield start_mesh
    for mesh in meshes:
        mesh.process.kill()
        mesh.process.wait()


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, [pid for pid in pids if is_alive(pid)]
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_with_status_0(
    start: Callable[..., Mesh], number: signal.Signals
) -> None:
    # Where the tests themselves run under nohup, what they start would ignore it too.
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        mesh = start(*WORKERS)
    finally:
        signal.signal(signal.SIGHUP, former)
    mesh.ready()
    assert len(mesh.pids()) == 5
    assert mesh.end(number) == 0
    assert not [pid for pid in mesh.pids() if is_alive(pid)]
    assert not list(mesh.folder.glob("*.json"))
    assert not [e for e in mesh.entries() if e.get("event") in ("died", "killed")]


def test_a_signal_that_comes_twice_at_once_is_one(
    start: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from `timeout 60 make serve`: one from `timeout`, one passed on by make."""
    monkeypatch.setenv("FAKE_DRAIN_GRACE_S", "600")
    mesh = start("decode-0:worker", "gateway:stubborn")
    mesh.ready()
    gateway = mesh.started("gateway")["pid"]
    for _ in range(2):
        mesh.process.send_signal(signal.SIGTERM)
        time.sleep(0.01)
    time.sleep(1.5 * SECOND_SIGNAL_AFTER_S)
    assert is_alive(gateway)
    assert mesh.end(signal.SIGTERM) == 0
    assert mesh.until(lambda e: e.get("event") == "killed")["name"] == "gateway"
    assert not [pid for pid in mesh.pids() if is_alive(pid)]


def test_under_nohup_a_hang_up_is_no_end(start: Callable[..., Mesh]) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # inherited
    try:
        mesh = start(*WORKERS)
    finally:
        signal.signal(signal.SIGHUP, before)
    mesh.ready()
    mesh.process.send_signal(signal.SIGHUP)
    # Told in order: had it ended the mesh, the workers would not start again.
    os.kill(mesh.started("prefill-0")["pid"], signal.SIGKILL)
    assert is_alive(mesh.started("prefill-0", 2)["pid"])
    assert mesh.end(signal.SIGTERM) == 0


def test_a_killed_supervisor_takes_everything_along(start: Callable[..., Mesh]) -> None:
    mesh = start(*WORKERS)
    mesh.ready()
    mesh.end(signal.SIGKILL)
    wait_gone(mesh.pids())


def test_a_dead_worker_is_proven_gone_reported_and_restarted(start: Callable[..., Mesh]) -> None:
    mesh = start("decode-0:worker", "decode-1:worker", "prefill-0:worker")
    mesh.ready()
    first = mesh.started("prefill-0")
    os.kill(first["pid"], signal.SIGKILL)
    second = mesh.started("prefill-0", 2)
    assert second["address"] == first["address"]
    assert second["worker_id"] == first["worker_id"]
    assert second["epoch"] != first["epoch"]
    # Both decode workers were told, when both processes were gone, before the restart.
    entries = mesh.entries()
    reports = [e for e in entries if e.get("report") == "prefill-0"]
    assert [(e["of"], e["alive"]) for e in reports] == [(first["epoch"], [])] * 2
    assert all(entries.index(report) < entries.index(second) for report in reports)
    assert mesh.end(signal.SIGINT) == 0
    assert not [pid for pid in mesh.pids() if is_alive(pid)]


def test_a_dead_engine_takes_its_server_along(start: Callable[..., Mesh]) -> None:
    mesh = start("decode-0:worker", "prefill-0:worker")
    mesh.ready()
    first = mesh.started("prefill-0")
    os.kill(first["engine_pid"], signal.SIGKILL)  # this server does not notice
    mesh.started("prefill-0", 2)
    report = mesh.until(lambda e: e.get("report") == "prefill-0")
    assert (report["of"], report["alive"]) == (first["epoch"], [])
    assert not is_alive(first["pid"])


async def test_a_process_tells_its_own_last_error(tmp_path: Path) -> None:
    told = f"it broke {random.randrange(2**31)}"
    old, new = ({"level": "error", "message": message} for message in ("of an earlier one", told))
    log = tmp_path / "x.log"
    log.write_text(json.dumps(old) + "\n")
    code = f"print({json.dumps(json.dumps(new))}); print('not JSON'); raise SystemExit(1)"
    command = (sys.executable, "-c", code)
    spec = ServiceSpec(name="x", command=command, ready_file=tmp_path / "x.json", log_file=log)
    process = ServiceProcess(spec)
    assert (await process.gone(), process.last_error()) == (1, told)
    quiet = ServiceProcess(replace(spec, command=(sys.executable, "-c", "raise SystemExit(2)")))
    assert (await quiet.gone(), quiet.last_error()) == (2, "")


def test_a_failed_start_ends_the_others(start: Callable[..., Mesh]) -> None:
    mesh = start("decode-0:worker", "gateway:fail")
    assert mesh.process.wait(120) == 1
    failure = mesh.until(lambda e: e.get("event") == "failed")
    assert failure["name"] == "gateway"
    assert "status 1" in failure["how"]
    assert "the fake fails as told" in (mesh.folder / "gateway.log").read_text()
    wait_gone(mesh.pids())


def test_a_service_that_cannot_be_started_again_is_tried_until_it_can(
    start: Callable[..., Mesh],
) -> None:
    mesh = start("decode-0:worker", "prefill-0:worker")
    mesh.ready()
    log = mesh.folder / "prefill-0.log"
    log.unlink()
    log.mkdir()  # stands for whatever the system refuses
    os.kill(mesh.started("prefill-0")["pid"], signal.SIGKILL)
    refused = mesh.until(lambda e: "could not be started" in e.get("how", ""))
    assert (refused["name"], str(log) in refused["how"]) == ("prefill-0", True)
    assert is_alive(mesh.started("decode-0")["pid"])
    log.rmdir()
    assert is_alive(mesh.started("prefill-0", 2)["pid"])
    assert mesh.end(signal.SIGINT) == 0


def test_a_service_that_is_never_ready_is_killed_and_tried_again(
    start: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_READY_TIMEOUT_S", "12")
    mesh = start("decode-0:worker", "prefill-0:worker")
    mesh.ready()
    mute = mesh.folder / "prefill-0.mute"
    mute.touch()
    os.kill(mesh.started("prefill-0")["pid"], signal.SIGKILL)
    second = mesh.started("prefill-0", 2)
    late = mesh.until(lambda e: "was not ready after 12 s" in e.get("how", ""))
    assert late["name"] == "prefill-0"
    wait_gone([second["pid"], second["engine_pid"]])
    mute.unlink()
    mesh.started("prefill-0", 3)
    mesh.until(lambda e: (e.get("event"), e.get("name")) == ("ready", "prefill-0"), 2)
    assert mesh.end(signal.SIGINT) == 0


def test_a_service_that_cannot_be_started_at_first_ends_the_others(
    start: Callable[..., Mesh], tmp_path: Path
) -> None:
    (tmp_path / "gateway.log").mkdir()
    mesh = start("decode-0:worker", "gateway")
    assert mesh.process.wait(120) == 1
    failure = mesh.until(lambda e: e.get("event") == "failed")
    assert failure["name"] == "gateway"
    assert "could not be started" in failure["how"]
    wait_gone(mesh.pids())


@pytest.mark.full_after(1)
@pytest.mark.parametrize("hurry", [False, True])
def test_a_stubborn_service_is_killed(
    start: Callable[..., Mesh], monkeypatch: pytest.MonkeyPatch, hurry: bool
) -> None:
    monkeypatch.setenv("FAKE_DRAIN_GRACE_S", "1")
    mesh = start("decode-0:worker:stubborn", "gateway:stubborn")
    mesh.ready()
    mesh.process.send_signal(signal.SIGINT)
    if hurry:
        time.sleep(0.3)  # two equal signals at once could merge into one
        mesh.process.send_signal(signal.SIGINT)
    assert mesh.process.wait(120) == 0
    killed = {(e["name"], e["is_late"]) for e in mesh.entries() if e.get("event") == "killed"}
    assert killed == {("decode-0", not hurry), ("gateway", not hurry)}
    assert not [pid for pid in mesh.pids() if is_alive(pid)]


def test_delays_grow_and_recover() -> None:
    backoff = RestartBackoff(first_s=1.0, most_s=8.0, calm_s=60.0)
    delays = [backoff.after(0.0) for _ in range(6)]
    for delay, middle in zip(delays, [1, 2, 4, 8, 8, 8], strict=True):
        assert 0.8 * middle <= delay <= 1.2 * middle
    assert backoff.after(61.0) <= 1.2
