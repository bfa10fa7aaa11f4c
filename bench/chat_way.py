"""Lists the product's files and functions that one chat passes, by process, in order.

    python bench/chat_way.py                  the numbers of files and functions
    python bench/chat_way.py --list           the functions themselves
    python bench/chat_way.py --typed          of the typed API, not of OpenAI's dialect

A mesh of a tiny random model serves it: a gateway and a decode worker on a CPU, without a prefill
worker or a store. What the processes call without a request is left out, and so is what only a
first request does. Code in C and the edge in Go are not seen.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import grpc
import httpx
from harness import Harness, Run
from weft.testing.meshes.tiny_mesh import MODEL, TinyMesh
from weft.v1 import gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).resolve().parent.parent
TEXT, NUM_TOKENS = "hello there", 8
IDLE_S = 3.0
"""How long the processes are watched without a request."""
AROUND_S = 0.5
"""Pause in which processes see that watching begins, or have written what they saw."""


class Function(NamedTuple):
    """A function of the product."""

    file: str
    """Path in the repository."""
    name: str
    line: int


harness = Harness(__file__, __doc__)
harness.flag("--list", action="store_true", help="each function, in order of first call")
harness.flag("--typed", action="store_true", help="a chat of the typed API")


@harness.part
def way(run: Run) -> None:
    """Runs one chat and tells its way."""
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory(prefix="weft-way-")))
    flag, notes = folder / "watched", folder / "notes"
    notes.mkdir()
    path = f"{Path(__file__).parent / 'tracing'}:{os.environ.get('PYTHONPATH', '')}"
    os.environ |= {"CALLS_WHILE": str(flag), "CALLS_INTO": str(notes), "PYTHONPATH": path}
    mesh = TinyMesh(folder, "--prefill", "0")
    run.stack.callback(mesh.stop)
    mesh.wait_ready()
    chat = typed_chat if run.options.typed else openai_chat
    chat(mesh)
    idle = called(flag, notes, lambda: time.sleep(IDLE_S))
    found = called(flag, notes, lambda: chat(mesh))
    total = 0
    for process, functions in found.items():
        own = [one for one in functions if one not in idle.get(process, ())]
        files = list(dict.fromkeys(one.file for one in own))
        total += len(files)
        run.keep(**{process: [f"{one.file}:{one.line} {one.name}" for one in own]})
        for one in own if run.options.list else ():
            print(f"  {one.file}:{one.line} {one.name}")
        run.note(f"{process}: {len(files)} files, {len(own)} functions")
    run.note(f"in all: {total} files")


def openai_chat(mesh: TinyMesh) -> None:
    """A streamed chat of OpenAI's dialect, through REST."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
    options = {"max_tokens": NUM_TOKENS, "stream": True}
    with httpx.Client(base_url=f"{mesh.url}/v1", timeout=60, trust_env=False) as client:
        answer = client.post("/chat/completions", json=body | options)
    assert answer.text.rstrip().endswith("[DONE]"), answer.text


def typed_chat(mesh: TinyMesh) -> None:
    """A streamed chat of the typed API."""
    request = gateway_pb2.ChatRequest(model=MODEL, stream=True)
    request.messages.add(role="user", content=TEXT)
    request.stop.max_tokens = NUM_TOKENS
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        assert list(gateway_pb2_grpc.GatewayServiceStub(channel).Chat(request, timeout=60))


def called(flag: Path, notes: Path, work: Callable[[], None]) -> dict[str, list[Function]]:
    """The product's functions that each process calls meanwhile, in order of their first calls."""
    flag.touch()
    time.sleep(AROUND_S)
    work()
    time.sleep(AROUND_S)
    flag.unlink()
    time.sleep(AROUND_S)
    found: dict[str, list[Function]] = {}
    for path in sorted(notes.glob("*.json")):
        told = json.loads(path.read_text())
        path.unlink()
        functions = [
            Function(str(Path(file).relative_to(ROOT)), name, line)
            for file, name, line in told["calls"]
            if file.startswith(f"{ROOT}/") and "/weft/" in file and "/gen/" not in file
        ]
        arguments = " ".join(told["argv"])
        for process, mark in (
            ("engine", "engine_process"),
            ("gateway", "serve gateway"),
            ("decode server", "serve decode"),
        ):
            if mark in arguments:
                found[process] = functions
    return found


if __name__ == "__main__":
    sys.exit(harness.main())
