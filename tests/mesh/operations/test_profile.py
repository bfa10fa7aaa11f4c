"""Profiles of a mesh: the command, both servers' bodies, refusals, early ends and lost workers."""

from __future__ import annotations

import gzip
import json
import os
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_kinds import on
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, TinyMesh

pytestmark = [pytest.mark.needs("go"), on("shipped")]
LONG_S = 120


@contextmanager
def under_load(mesh: TinyMesh) -> Iterator[None]:
    """Prompts come one after another, each of them shipped."""
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            body = {
                "model": MODEL,
                "prompt": [secrets.randbelow(VOCAB) for _ in range(60)],
                "max_tokens": 30,
                "ignore_eos": True,
            }
            url = f"{mesh.url}/v1/completions"
            httpx.post(url, json=body, timeout=LONG_S, trust_env=False)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def weft(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*WEFT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False)


def post(mesh: TinyMesh, path: str, body: object = None, token: str | None = "") -> httpx.Response:
    token = (mesh.state / "admin-token").read_text().strip() if token == "" else token
    return httpx.post(
        f"{mesh.url}/{path}",
        content=b"" if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=LONG_S,
        trust_env=False,
    )


class Trace:
    """A trace, by the names of its processes."""

    def __init__(self, path: Path) -> None:
        wait_until(path.exists, 60)
        content = json.loads(gzip.decompress(path.read_bytes()))
        self.notes: list[str] = content["otherData"]["notes"]
        self.base_s = content["baseTimeNanoseconds"] / 1e9
        self.events: list[dict[str, Any]] = content["traceEvents"]
        names = [event for event in self.events if event["name"] == "process_name"]
        self.processes = {event["args"]["name"]: event["pid"] for event in names}
        assert len(self.processes) == len(names)

    def of(self, process: str) -> list[dict[str, Any]]:
        pid = self.processes[process]
        return [event for event in self.events if event["pid"] == pid and event["ph"] == "X"]

    def steps(self, worker: str) -> list[dict[str, Any]]:
        events = self.of(f"{worker} rank 0: host")
        return [event for event in events if event["name"].startswith("step ")]

    def requests(self, service: str) -> list[dict[str, Any]]:
        return self.of(f"{service}: requests")


def is_within(inner: dict[str, Any], outer: dict[str, Any], slack_us: float = 0.0) -> bool:
    begins, ends = inner["ts"], inner["ts"] + inner["dur"]
    return bool(outer["ts"] - slack_us <= begins and ends <= outer["ts"] + outer["dur"] + slack_us)


def test_steps_and_spans_are_on_one_clock(mesh: TinyMesh, tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    began_s = time.time()
    with under_load(mesh):
        done = weft(
            "profile", "--steps", "5", "--state-dir", str(mesh.state), "--output", str(path)
        )
    assert done.returncode == 0, done.stderr
    assert "decode-0: 5 steps;" in done.stdout
    assert "prefill-0: 5 steps;" in done.stdout
    assert "https://ui.perfetto.dev" in done.stdout
    trace = Trace(path)
    assert trace.notes == []
    assert began_s - 2 <= trace.base_s <= time.time()
    assert any(event.get("cat") == "cpu_op" for event in trace.events)
    # A step runs within a request there, and one that decodes within its decoding.
    for worker in ("decode-0", "prefill-0"):
        steps, spans = trace.steps(worker), trace.requests(worker)
        assert len(steps) == 5
        for step in steps:
            assert any(is_within(step, span, 1000.0) for span in spans), (step, spans)
    decoding = [span for span in trace.requests("decode-0") if span["name"] == "decode"]
    decodes = [step for step in trace.steps("decode-0") if "1 decodes" in step["name"]]
    assert decodes
    for step in decodes:
        assert any(is_within(step, span, 1000.0) for span in decoding)
    # In a row of spans each lies within another, or after it.
    for service in ("gateway", "decode-0", "prefill-0"):
        name = next(name for name in trace.processes if name.startswith(service))
        rows: dict[int, list[float]] = {}
        for span in sorted(trace.of(name), key=lambda one: (one["ts"], -one["dur"])):
            ends = rows.setdefault(span["tid"], [])
            while ends and ends[-1] <= span["ts"]:
                ends.pop()
            assert not ends or span["ts"] + span["dur"] <= ends[-1] + 0.01
            ends.append(span["ts"] + span["dur"])
    # An arrow has two ends, and no other arrow's number.
    for kind in ("s", "f"):
        ids = [event["id"] for event in trace.events if event["ph"] == kind]
        assert len(ids) == len(set(ids)) > 0
    shown = next(
        span["args"]["request"] for span in decoding if is_within(decodes[0], span, 1000.0)
    )
    told = weft("trace", shown, "--address", mesh.grpc_address)
    assert f"profiled meanwhile: {mesh.state / 'profiles'}" in told.stdout, told.stdout


def test_the_bodies_of_other_servers(mesh: TinyMesh) -> None:
    with under_load(mesh):
        vllm = post(mesh, "start_profile", {"profile_prefix": "mine", "max_iterations": 3})
        assert vllm.status_code == 200, vllm.text
        path = Path(vllm.json()["path"])
        assert path.parent == mesh.state / "profiles"
        assert path.name.startswith("mine-")
        assert len(Trace(path).steps("decode-0")) == 3
        folder = mesh.state / "profiles" / "below"
        sglang = post(
            mesh,
            "start_profile",
            {
                "output_dir": str(folder),
                "num_steps": "4",
                "activities": ["CPU", "GPU"],
                "merge_profiles": True,
                "profile_by_stage": False,
                "with_stack": True,
            },
        )
    assert sglang.status_code == 200, sglang.text
    assert "with_stack: left out" in sglang.headers["x-weft-warnings"]
    # The answer comes with the file.
    answer = sglang.json()
    assert answer["steps"] == {"decode-0": 4, "prefill-0": 4}
    path = Path(answer["path"])
    assert path.parent == folder
    assert path.exists()
    assert len(Trace(path).steps("prefill-0")) == 4


def test_a_profile_is_stopped_in_the_middle(mesh: TinyMesh) -> None:
    started = post(mesh, "start_profile")
    assert started.status_code == 200, started.text
    assert "at most 100 steps" in started.headers["x-weft-warnings"]
    # Idle engines make no steps, so it still runs.
    second = post(mesh, "start_profile", {"max_iterations": 1})
    assert (second.status_code, second.json()["error"]["code"]) == (409, "profile_running")
    begun = weft("profile", "--state-dir", str(mesh.state))
    assert begun.returncode == 1
    assert started.json()["profile_id"] in begun.stderr
    stopped = post(mesh, "stop_profile")
    assert stopped.status_code == 200, stopped.text
    assert stopped.json()["path"] == started.json()["path"]
    trace = Trace(Path(started.json()["path"]))
    assert trace.steps("decode-0") == []
    # Again: it has ended.
    assert post(mesh, "stop_profile").json()["path"] == started.json()["path"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"output_dir": "/tmp/elsewhere"}, "output_dir"),
        ({"output_dir": "../up"}, "output_dir"),
        ({"num_steps": 101}, "num_steps"),
        ({"max_iterations": -1}, "max_iterations"),
        ({"num_steps": 5, "max_iterations": 5}, "max_iterations"),
        ({"activities": ["CPU", "MEM"]}, "activities"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_stages": ["decode"]}, "profile_stages"),
        ({"num_step": 5}, "num_step"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    mesh: TinyMesh, body: dict[str, object], param: str
) -> None:
    answer = post(mesh, "start_profile", body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["start_profile", "stop_profile"])
def test_only_operators_may_profile(mesh: TinyMesh, path: str) -> None:
    for token in (None, "sk-somebody"):
        assert post(mesh, path, {}, token).status_code == 401


def test_a_worker_that_dies_is_named(mesh: TinyMesh) -> None:
    started = post(mesh, "start_profile", {"max_iterations": 50})
    assert started.status_code == 200, started.text
    os.kill(mesh.service("decode-0")["pid"], signal.SIGKILL)
    stopped = post(mesh, "stop_profile")
    assert stopped.status_code == 200, stopped.text
    trace = Trace(Path(started.json()["path"]))
    assert any(note.startswith("decode-0: ") for note in trace.notes)
    assert "prefill-0 rank 0: host" in trace.processes
    assert "decode-0 rank 0: host" not in trace.processes
    mesh.wait_healthy()
