"""Time to start a mesh, and its memory at rest and with grammars that requests have brought.

    python bench/footprint.py
    python bench/footprint.py --weft OTHER_CHECKOUT/.venv/bin/weft      the same of another version

It starts `weft up` with the demo model three times, waits until REST is ready, adds up the
proportional set sizes of all processes, sends requests that are constrained by random schemas, each
by another one, and adds up again.
"""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Harness, Run

START_TIMEOUT_S = 300


def free_port() -> int:
    """A port that nobody uses now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def memory_bytes(pid: int) -> int:
    """Proportional set size of a process and all that it has started."""
    root = psutil.Process(pid)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue  # it has ended meanwhile
    return total


def schema(rng: random.Random) -> dict[str, Any]:
    """An object of a few fields of several kinds, whose names nobody has used before."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": rng.randrange(3, 20)},
        {"type": "integer", "minimum": 0, "maximum": rng.randrange(10, 1000)},
        {"enum": [f"choice-{rng.randrange(1000)}" for _ in range(4)]},
        {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    ]
    names = [f"field_{rng.randrange(10**6)}" for _ in kinds]
    properties = dict(zip(names, kinds, strict=True))
    return {
        "type": "object",
        "properties": properties,
        "required": names,
        "additionalProperties": False,
    }


def constrain(url: str, model: str, count: int, rng: random.Random) -> None:
    """Requests `count` answers, each constrained by a schema of its own."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        for _ in range(count):
            body = {
                "model": model,
                "messages": [{"role": "user", "content": "Answer."}],
                "max_tokens": 8,
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": schema(rng)},
                },
            }
            answer = client.post("/v1/chat/completions", json=body)
            answer.raise_for_status()


def measure(weft: Path, count: int, rng: random.Random) -> tuple[float, int, int]:
    """Seconds until a mesh is ready, its bytes at rest, and with so many grammars."""
    rest, grpc = free_port(), free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = [str(weft), "up", "--rest-port", str(rest), "--grpc-port", str(grpc)]
        command += ["--state-dir", folder, "--local-prefill-max-tokens", "0"]
        with (Path(folder) / "log").open("wb") as log:
            began = time.monotonic()
            mesh = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                url = f"http://127.0.0.1:{rest}"
                while True:
                    try:
                        if httpx.get(f"{url}/readyz", trust_env=False).status_code == 200:
                            break
                    except httpx.HTTPError:
                        pass
                    if mesh.poll() is not None or time.monotonic() - began > START_TIMEOUT_S:
                        sys.exit((Path(folder) / "log").read_text()[-3000:])
                    time.sleep(0.05)
                ready_s = time.monotonic() - began
                time.sleep(3)
                at_rest = memory_bytes(mesh.pid)
                listed = httpx.get(f"{url}/v1/models", trust_env=False).json()
                constrain(url, listed["data"][0]["id"], count, rng)
                time.sleep(1)
                return ready_s, at_rest, memory_bytes(mesh.pid)
            finally:
                mesh.send_signal(signal.SIGINT)
                mesh.wait(60)


harness = Harness(__file__, __doc__, repeats=3)
harness.flag("--weft", type=Path, default=Path(sys.executable).with_name("weft"))
harness.flag("--grammars", type=int, default=50)


@harness.part
def footprint(run: Run) -> None:
    """All starts."""
    rng, grammars = random.Random(7), run.options.grammars
    for _ in range(run.options.repeats):
        ready_s, at_rest, later = measure(run.options.weft, grammars, rng)
        figures = {f"with {grammars} grammars, MiB": later / 2**20}
        run.row({"ready_s": ready_s, "at rest, MiB": at_rest / 2**20} | figures)


if __name__ == "__main__":
    sys.exit(harness.main())
