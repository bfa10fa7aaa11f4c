"""Videos through a whole mesh over REST, with the prompt computed by the owner or by a prefill
worker: one text, whichever worker dies in the middle.
"""

from __future__ import annotations

import base64
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import httpx
import pytest
from weft.contract.codec.pairs import FAULT
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.models.tiny_qwen_vl import IDS, VIDEO
from weft.testing.models.tiny_video import make_watching, video
from weft.v1 import admin_pb2

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400), pytest.mark.full]

NUM_NEW = 300
KILLED_AT = 20
"""Tokens of the answer after which a worker is killed."""


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen2_5_vl"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("video") / "watching"
    return make_watching(request.param, folder, random.randrange(2**31))


@pytest.fixture(scope="module", params=["apart", "whole"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def mesh(
    kind: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory, rest_binary: Path
) -> Iterator[LocalMesh]:
    """Apart: the decode worker has no tower and no prompt of its own."""
    flags = ("--model", str(model_dir), "--dtype", "float32", "--enable-faults")
    if kind == "whole":
        flags += ("--prefill", "0", "--decode-args", f"{PATIENT} --prefill-chunk-tokens 32")
    else:
        flags += ("--local-prefill-max-tokens", "0")
        flags += ("--decode-args", f"{PATIENT} --language-model-only")
        flags += ("--prefill-args", "--prefill-chunk-tokens 32")
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags)
    with mesh.serving():
        yield mesh


def new_messages() -> list[dict[str, Any]]:
    """Two videos among texts."""
    content: list[dict[str, Any]] = []
    for words in ("What happens here?", "And here?"):
        size = (random.randrange(32, 100, 2), random.randrange(32, 100, 2))
        film = video(random.randint(20, 50), Fraction(10), size)
        data = base64.b64encode(film).decode()
        content.append({"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}"}})
        content.append({"type": "text", "text": words})
    return [{"role": "user", "content": content}]


def ask(
    mesh: LocalMesh, messages: list[dict[str, Any]], at_token: Callable[[], None] | None = None
) -> tuple[list[int], int]:
    """The answer's tokens and the number of the prompt's. `at_token` runs in its middle."""
    body = {
        "model": "watching",
        "messages": messages,
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    ids, num_prompt = list[int](), 0
    url = f"{mesh.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=180) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            before = len(ids)
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            if at_token is not None and before < KILLED_AT <= len(ids):
                at_token()
            num_prompt = (event.get("usage") or {}).get("prompt_tokens", num_prompt)
    assert len(ids) == NUM_NEW
    return ids, num_prompt


def kill(mesh: LocalMesh, victim: str, process: str) -> None:
    os.kill(mesh.service(victim)[process], signal.SIGKILL)


def wait_idle(mesh: LocalMesh) -> None:
    mesh.wait_healthy()
    wait_until(lambda: mesh.is_idle("decode-0"), 60, "the worker is idle")


def flush(mesh: LocalMesh, kind: str) -> None:
    """Forgets all pages, so that the next answer has to look at the videos again."""
    for name in ("decode-0", "prefill-0") if kind == "apart" else ("decode-0",):
        with mesh.operators(name) as (stub, metadata):
            stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata, timeout=30)


def test_counts_of_tokens_agree(mesh: LocalMesh, kind: str) -> None:
    messages = new_messages()
    body = {"model": "watching", "messages": messages}
    told = httpx.post(f"{mesh.url}/tokenize", json=body, timeout=60).json()
    assert told["tokens"].count(IDS[VIDEO]) > 0
    (_, first), (_, again) = ask(mesh, messages), ask(mesh, messages)
    assert len(told["tokens"]) == told["count"] == first == again
    encoder = "prefill-0" if kind == "apart" else "decode-0"
    assert mesh.counters(encoder)["encoded_media"] > 0
    assert kind == "whole" or mesh.counters("decode-0")["encoded_media"] == 0


@pytest.mark.parametrize(
    ("victim", "process"),
    [("decode-0", "engine_pid"), ("decode-0", "pid"), ("prefill-0", "pid")],
)
def test_an_answer_survives_a_worker(mesh: LocalMesh, kind: str, victim: str, process: str) -> None:
    """Also if the decode worker is killed: the one that goes on never got the frames or pages."""
    if kind == "whole" and victim == "prefill-0":
        pytest.skip("there is none")
    messages = new_messages()
    wanted, num_prompt = ask(mesh, messages)
    flush(mesh, kind)
    found = ask(mesh, messages, lambda: kill(mesh, victim, process))
    assert found == (wanted, num_prompt)
    wait_idle(mesh)


def test_a_prompt_survives_the_worker_that_computes_it(mesh: LocalMesh, kind: str) -> None:
    """It is killed when its owner has the first pages, or in the middle of its own prompt."""
    messages = new_messages()
    wanted = ask(mesh, messages)
    flush(mesh, kind)
    victim = "prefill-0" if kind == "apart" else "decode-0"
    sign = "accepted_pages" if kind == "apart" else "prefix_query_tokens"
    before = mesh.counters("decode-0")[sign]
    held = FaultSpec(point="engine.step", kind="delay", count=0, skip=4, delay_s=60.0)
    if kind == "whole":  # A worker tells what it has done between two steps.
        held = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=1.0)
    with mesh.operators(victim) as (stub, metadata):
        request = admin_pb2.InjectFaultRequest(fault=FAULT.encode(held))
        stub.InjectFault(request, metadata=metadata, timeout=60)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, mesh, messages)

        def has_begun() -> bool:
            return bool(mesh.counters("decode-0")[sign] > before)

        wait_until(has_begun, 60, "the prompt has begun")
        assert not answer.done()
        kill(mesh, victim, "pid")
        assert answer.result(180) == wanted
    wait_idle(mesh)
