"""The KV store in a real mesh: what one worker computed, no other computes again."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from local_mesh import WEFT, LocalMesh, wait_until
from mesh_calls import Answer, Ask, Caller, num_fillable
from mesh_prompts import MeshPrompt
from weft.v1 import common_pb2

pytestmark = pytest.mark.needs("nixl", "go")
KVSTORE = common_pb2.FILL_SOURCE_KVSTORE


@pytest.fixture(scope="module", params=["direct", "staged"])
def mesh(
    tmp_path_factory: pytest.TempPathFactory, rest_binary: Path, request: pytest.FixtureRequest
) -> Iterator[LocalMesh]:
    flags = ["--dtype", "float32", "--decode", "2", "--kvstore", "1", "--kv-memory-bytes"]
    if request.param == "staged":
        args = f"--force-staging --staging-bytes {64 << 20}"
        flags = [f"--decode-args={args}", f"--prefill-args={args}", *flags]
    mesh = LocalMesh(
        tmp_path_factory.mktemp("store"),
        *flags,
        str(256 << 20),
        "--local-prefill-max-tokens",
        "0",
        "--gateway-args=--decode-policy round_robin",
    )
    mesh.wait_ready()
    yield mesh
    assert mesh.stop() == 0, mesh.text


def flush(mesh: LocalMesh, *workers: str) -> None:
    """Empties the workers' own prefix caches; all of them unless some are named."""
    workers = workers or (*mesh.names("prefill"), *mesh.names("decode"))
    subprocess.run(
        [*WEFT, "flush", "--state-dir", str(mesh.state), *workers], check=True, timeout=60
    )


def stored(mesh: LocalMesh) -> int:
    """Pages that all workers together have put."""
    workers = [*mesh.names("prefill"), *mesh.names("decode")]
    return sum(mesh.counters(name)["store_stored_pages"] for name in workers)


def story(num_words: int) -> MeshPrompt:
    """A chat prompt that nobody has seen before."""
    words = " ".join(secrets.token_hex(3) for _ in range(num_words))
    text = f"Here are some words: {words}. Say something about them."
    return MeshPrompt("story", messages=(("user", text),))


def ask_of_store(mesh: LocalMesh, prompt: MeshPrompt, text: str) -> Answer:
    """An answer to a prompt that no worker has, with pages of the store; its text is as before.

    The store is asked for 80 ms at most, which a busy machine may miss.
    """
    answers: list[Answer] = []

    def is_of_store() -> bool:
        flush(mesh)
        answers.append(ask(mesh, prompt))
        assert answers[-1].text == text
        return KVSTORE in [fill.source for fill in answers[-1].timeline.fills]

    wait_until(is_of_store, 60)
    return answers[-1]


def ask(mesh: LocalMesh, prompt: MeshPrompt, max_tokens: int = 24) -> Answer:
    async def call() -> Answer:
        async with Caller(mesh) as caller:
            return await caller.ask("rest", Ask(prompt, max_tokens, ignore_eos=True))

    return asyncio.run(call())


def computed_by_others(answer: Answer) -> int:
    return sum(fill.computed_tokens for fill in answer.timeline.fills)


def test_workers_say_how_pages_travel(mesh: LocalMesh, request: pytest.FixtureRequest) -> None:
    command = [*WEFT, "status", "--json", "--address", mesh.grpc_address]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    is_staged = "staged" in request.node.callspec.id
    details = {w["worker_id"]: w["transport_detail"] for w in json.loads(done.stdout)["workers"]}
    for name in (*mesh.names("prefill"), *mesh.names("decode")):
        assert ("staged through" in details[name]) == is_staged


def test_store_hits_are_store_hits(mesh: LocalMesh) -> None:
    """After a flush of all workers the pages come from the store, and the text stays the same."""
    prompt = story(60)
    first = ask(mesh, prompt)
    fillable = num_fillable(first.prompt_tokens)
    wait_until(lambda: stored(mesh) >= fillable // 16, 20)
    again = ask_of_store(mesh, prompt, first.text)
    (fill,) = again.timeline.fills
    assert (fill.source, fill.failure) == (KVSTORE, "")
    assert again.timeline.matched_tokens == 0
    assert fill.accepted_tokens == fillable
    assert again.timeline.local_prefill_tokens == first.prompt_tokens - fillable
    assert computed_by_others(again) == 0


def test_the_second_turn_of_a_chat_is_found_elsewhere(mesh: LocalMesh) -> None:
    """The answer of one decode worker is part of the prompt at the other one."""
    prompt = story(40)
    before = stored(mesh)
    first = ask(mesh, prompt, 64)
    # The last generated token has no KV yet.
    num_pages = (first.prompt_tokens + first.completion_tokens - 1) // 16
    # The pages of the system message are there already.
    wait_until(lambda: stored(mesh) - before >= num_pages - 2, 20)
    turns = (*prompt.messages, ("assistant", first.text), ("user", "Go on."))
    second_prompt = MeshPrompt("second turn", messages=turns)
    tokens: list[int] = []
    texts: set[str] = set()

    def is_found_elsewhere() -> bool:
        flush(mesh)
        second = ask(mesh, second_prompt)
        texts.add(second.text)
        fills = [fill for fill in second.timeline.fills if fill.source == KVSTORE]
        tokens.append(sum(fill.accepted_tokens for fill in fills))
        # What the store has is of the worker that generated it: nobody puts a page twice.
        elsewhere = second.timeline.worker_id != first.timeline.worker_id
        return elsewhere and tokens[-1] > num_fillable(first.prompt_tokens) + 16

    wait_until(is_found_elsewhere, 60, lambda: str(tokens))
    assert len(texts) == 1


def test_a_prefill_worker_loads_what_it_lacks(mesh: LocalMesh) -> None:
    """After a restart of the prefill worker a longer prompt costs only its new part."""
    prompt = story(60)
    before = stored(mesh)
    first = ask(mesh, prompt)
    fillable = num_fillable(first.prompt_tokens)
    wait_until(lambda: stored(mesh) - before >= fillable // 16, 20)
    epoch = mesh.service("prefill-0")["epoch"]
    os.kill(mesh.service("prefill-0")["pid"], signal.SIGKILL)
    wait_until(lambda: (mesh.ready_file("prefill-0") or {}).get("epoch", epoch) != epoch, 90)
    again = ask_of_store(mesh, prompt, first.text)
    assert computed_by_others(again) == 0


def test_without_its_store_the_mesh_goes_on(mesh: LocalMesh) -> None:
    prompt = story(50)
    first = ask(mesh, prompt)
    pid = mesh.service("kvstore-0")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), 10)
    flush(mesh)
    again = ask(mesh, prompt)
    assert again.text == first.text
    assert all(fill.source != KVSTORE for fill in again.timeline.fills)
    wait_until(
        lambda: (mesh.ready_file("kvstore-0") or {}).get("pid", pid) != pid, 60
    )  # restarted by the supervisor
    # Workers find the new store when they next ask it, and put what it lacks of prompts from then.
    prompt = story(50)
    ask_of_store(mesh, prompt, ask(mesh, prompt).text)
    mesh.wait_idle()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
