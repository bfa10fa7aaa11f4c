"""`weft up` as a user runs it: real services, a tiny model, the Go edge."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from weft.cli.up.ports import free_ports
from weft.cli.up.state import locked_state_folder
from weft.testing.meshes.local_mesh import ownerless_shared_memory
from weft.testing.models.tiny_models import make_tiny

WEFT = [sys.executable, "-m", "weft.cli"]


class LocalMesh:
    """A running `weft up`."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.rest_port, self.grpc_port = free_ports("127.0.0.1", 2)
        self.state = folder / "state"
        self.output = folder / "up.txt"
        model = make_tiny("llama", folder / "tiny-model", tokenizer=True, vocab_size=512)
        ports = ["--rest-port", str(self.rest_port), "--grpc-port", str(self.grpc_port)]
        places = ["--state-dir", str(self.state), "--model", str(model)]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*WEFT, "up", *ports, *places, "--kv-memory-bytes", "4194304", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def until(self, text: str, count: int = 1) -> None:
        """Waits until `weft up` has printed `text` so often."""
        deadline = time.monotonic() + 240
        while self.text.count(text) < count:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < deadline, self.text
            time.sleep(0.1)

    def ready_file(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.state / "run" / f"{name}.json").read_text())
        return content

    def family(self) -> list[psutil.Process]:
        """Every process of the mesh but the supervisor."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def chat(self) -> httpx.Response:
        body = {"model": "tiny-model", "messages": [{"role": "user", "content": "x" * 99}]}
        url = f"http://127.0.0.1:{self.rest_port}/v1/chat/completions"
        return httpx.post(url, json={**body, "max_tokens": 3}, timeout=60, trust_env=False)

    def say(self, text: str) -> None:
        """Gets an answer by `weft chat`."""
        command = [*WEFT, "chat", "--address", f"127.0.0.1:{self.grpc_port}", "--max-tokens", "3"]
        done = subprocess.run(
            command, input=f"{text}\n", capture_output=True, text=True, timeout=120
        )
        # A model of random weights may end its answer before.
        assert re.search(r"^[1-3] tokens, ", done.stdout, re.M), done.stdout + done.stderr

    def status(self) -> dict[str, dict[str, Any]]:
        command = [*WEFT, "status", "--json", "--address", f"127.0.0.1:{self.grpc_port}"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        return {worker["worker_id"]: worker for worker in json.loads(done.stdout)["workers"]}


@pytest.fixture
def mesh(tmp_path: Path, rest_binary: Path) -> Iterator[LocalMesh]:
    local = LocalMesh(tmp_path, "--local-prefill-max-tokens", "0")
    yield local
    local.process.kill()  # and everything else dies with it
    local.process.wait()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)  # Some of them start a process to ask.


@pytest.mark.needs("go")
def test_a_mesh_lives_heals_and_leaves_nothing(mesh: LocalMesh) -> None:
    before = ownerless_shared_memory()
    mesh.until("Ctrl-C ends it.")
    # The banner's first request works as it stands.
    command = next(line for line in mesh.text.splitlines() if line.startswith("curl "))
    done = subprocess.run(shlex.split(command), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"

    # A killed prefill server comes back as itself, and fills again.
    first = mesh.ready_file("prefill-0")
    os.kill(first["pid"], signal.SIGKILL)
    mesh.until("prefill-0 is ready", 2)
    second = mesh.ready_file("prefill-0")
    assert second["worker_id"] == first["worker_id"]
    assert second["address"] == first["address"]
    assert second["epoch"] != first["epoch"]
    assert not psutil.pid_exists(first["engine_pid"])
    wait_until(lambda: all(worker["healthy"] for worker in mesh.status().values()))
    assert mesh.chat().status_code == 200
    # So do the gateway and the edge.
    for name in ("gateway", "rest"):
        os.kill(mesh.ready_file(name)["pid"], signal.SIGKILL)
    for name in ("gateway", "rest"):
        mesh.until(f"{name} is ready", 2)
    wait_until(lambda: mesh.chat().status_code == 200)
    assert mesh.status().keys() == {"prefill-0", "decode-0"}
    wait_until(lambda: mesh.status()["decode-0"]["pages"]["quarantined"] == 0)

    family = mesh.family()
    assert len(family) == 6
    mesh.process.send_signal(signal.SIGINT)
    assert mesh.process.wait(120) == 0, mesh.text
    assert not [process for process in family if process.is_running()]
    assert not list((mesh.state / "run").iterdir())
    # Meshes of other tests end beside this one: what they leave is soon removed.
    wait_until(lambda: ownerless_shared_memory() <= before)


@pytest.mark.timeout(900)
def test_an_engine_that_stands_still_is_killed_and_replaced(tmp_path: Path) -> None:
    """Its process lives, so nothing else would ever end it."""
    # A dump takes some seconds, and the kill does not wait for it.
    flags = ["--no-rest", "--prefill", "0", "--stall-timeout-s", "12"]
    mesh = LocalMesh(tmp_path, *flags, "--decode-args", "--stall-dump-after-s 1")
    try:
        mesh.until("Ctrl-C ends it.")
        # An engine that has measured no prompt is given 20 s more.
        mesh.say("long " * 100)
        first = mesh.ready_file("decode-0")
        os.kill(first["engine_pid"], signal.SIGSTOP)
        mesh.until("decode-0 has stood still for 12 s and is killed")
        mesh.until("decode-0 is ready", 2)
        assert not psutil.pid_exists(first["engine_pid"])
        second = mesh.ready_file("decode-0")
        assert second["epoch"] != first["epoch"]
        assert second["address"] == first["address"]
        # What is known of the stall outlives the worker.
        assert list((mesh.state / "crashes").glob("[0-9]*-decode-0-stall"))
        wait_until(lambda: all(worker["healthy"] for worker in mesh.status().values()))
        mesh.say("hi")
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(60) == 0, mesh.text
    finally:
        mesh.process.kill()
        mesh.process.wait()


def test_a_failed_start_shows_the_log(tmp_path: Path) -> None:
    mesh = LocalMesh(
        tmp_path, "--no-rest", "--prefill", "0", "--decode-args", "--host-cache-bytes 1"
    )
    assert mesh.process.wait(120) == 1
    assert "decode-0 ended with status 1 before it was ready" in mesh.text
    assert "host_cache_bytes = 1" in mesh.text


def test_a_taken_port_and_a_taken_folder_name_their_flags(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        told = refused("--grpc-port", port, "--state-dir", str(tmp_path))
    assert "--grpc-port" in told
    assert port in told
    with locked_state_folder(tmp_path):
        told = refused("--grpc-port", port, "--state-dir", str(tmp_path))
    assert "--state-dir" in told
    unwritable = tmp_path / "unwritable"
    (unwritable / "admin-token").mkdir(parents=True)
    told = refused("--grpc-port", port, "--state-dir", str(unwritable))
    assert f"cannot use {unwritable}: " in told
    assert "Traceback" not in told


def test_missing_keys_and_certificates_name_the_commands_that_make_them(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    told = refused("--api-keys-file", str(missing))
    assert f"`weft keys add TENANT --file {missing}`" in told
    told = refused("--tls-dir", str(missing))
    assert f"`weft certs {missing}`" in told


def test_a_folder_without_room_names_its_flag(tmp_path: Path) -> None:
    """A limit of the size of files stands for a full disk."""
    port = str(free_ports("127.0.0.1", 1)[0])
    flags = ("--grpc-port", port, "--state-dir", str(tmp_path), "--model", str(tmp_path / "none"))
    told = refused(*flags, before=("sh", "-c", 'ulimit -f 100; exec "$@"', "sh"))
    assert f"cannot use {tmp_path}: " in told
    assert "--state-dir" in told


def refused(*flags: str, before: tuple[str, ...] = ()) -> str:
    """What `weft up` says when it does not even begin."""
    command = [*before, *WEFT, "up", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    return done.stderr
