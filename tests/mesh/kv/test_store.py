"""The KV store in a real mesh: what one worker computed, no other computes again."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_calls import num_fillable
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.needs("nixl", "go")
KVSTORE, PREFILL = common_pb2.FILL_SOURCE_KVSTORE, common_pb2.FILL_SOURCE_PREFILL
NUM_NEW, NUM_LONG = 12, 60


@pytest.fixture(scope="module", params=["direct", pytest.param("staged", marks=pytest.mark.full)])
def mesh(
    tmp_path_factory: pytest.TempPathFactory, rest_binary: Path, request: pytest.FixtureRequest
) -> Iterator[TinyMesh]:
    # Pages of a few kilobytes: computing them is as fast as anything.
    args = "--load-back-threshold 0 --kv-memory-bytes 16777216"
    if request.param == "staged":
        args += f" --force-staging --staging-bytes {4 << 20}"
    mesh = TinyMesh(
        tmp_path_factory.mktemp("store"),
        *("--decode", "2", "--kvstore", "1", "--local-prefill-max-tokens", "0"),
        *(f"--decode-args={args} {PATIENT}", f"--prefill-args={args}"),
        "--gateway-args=--decode-policy round_robin",
    )
    mesh.wait_ready()
    mesh.wait_healthy()
    yield mesh
    assert mesh.stop() == 0, mesh.text


@pytest.fixture(scope="module")
def greedy(mesh: TinyMesh) -> Greedy:
    return Greedy(mesh.model_dir)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client is told."""

    ids: list[int]
    timeline: common_pb2.Timeline

    @property
    def computed_by_others(self) -> int:
        """Prompt tokens."""
        return sum(fill.computed_tokens for fill in self.timeline.fills)


def flush(mesh: TinyMesh) -> None:
    """Empties the workers' own prefix caches."""
    for name in (*mesh.names("prefill"), *mesh.names("decode")):
        mesh.flush(name)


def stored(mesh: TinyMesh, *names: str) -> int:
    """Pages that some workers together have put by now; without names, all of them."""
    workers = names or (*mesh.names("prefill"), *mesh.names("decode"))
    return sum(mesh.load_now(name).counters["store_stored_pages"] for name in workers)


def new_prompt(length: int) -> list[int]:
    """A prompt that nobody has seen before."""
    return [random.randrange(3, VOCAB) for _ in range(length)]


def ask(mesh: TinyMesh, greedy: Greedy, prompt: list[int], num_new: int = NUM_NEW) -> Answer:
    """Asks, and checks the tokens."""
    request = gateway_pb2.CompleteRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopCriteria(max_tokens=num_new, ignore_eos=True),
    )
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        (message,) = stub.Complete(request, timeout=120)
    (choice,) = message.choices
    greedy.check(prompt, choice.token_ids, num_new)
    return Answer(list(choice.token_ids), message.timeline)


def ask_of_store(mesh: TinyMesh, greedy: Greedy, prompt: list[int]) -> Answer:
    """An answer to a prompt that no worker has, with pages of the store.

    The store is asked for 80 ms at most, which a busy machine may miss.
    """
    answers: list[Answer] = []

    def is_of_store() -> bool:
        flush(mesh)
        answers.append(ask(mesh, greedy, prompt))
        return KVSTORE in [fill.source for fill in answers[-1].timeline.fills]

    wait_until(is_of_store, 60)
    return answers[-1]


def test_workers_say_how_pages_travel(mesh: TinyMesh, request: pytest.FixtureRequest) -> None:
    command = [*WEFT, "status", "--json", "--address", mesh.grpc_address]
    done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
    is_staged = "staged" in request.node.callspec.id
    details = {w["worker_id"]: w["transport_detail"] for w in json.loads(done.stdout)["workers"]}
    for name in (*mesh.names("prefill"), *mesh.names("decode")):
        assert ("staged through" in details[name]) == is_staged


def test_store_hits_are_store_hits(mesh: TinyMesh, greedy: Greedy) -> None:
    """After a flush of all workers the pages come from the store, and the text stays the same."""
    prompt = new_prompt(300)
    mesh.wait_empty()
    before = stored(mesh)
    ask(mesh, greedy, prompt)
    fillable = num_fillable(len(prompt))
    wait_until(lambda: stored(mesh) - before >= fillable // 16, 20)
    again = ask_of_store(mesh, greedy, prompt)
    (fill,) = again.timeline.fills
    assert (fill.source, fill.failure) == (KVSTORE, "")
    assert again.timeline.matched_tokens == 0
    assert fill.accepted_tokens == fillable
    assert again.timeline.local_prefill_tokens == len(prompt) - fillable
    assert again.computed_by_others == 0


def test_a_store_that_is_late_for_a_prompt_gets_its_pages(mesh: TinyMesh, greedy: Greedy) -> None:
    """It answers no lookup in time, as on a machine that is busy for a moment."""
    prompt = new_prompt(300)
    mesh.wait_empty()
    before = stored(mesh)
    pid = mesh.service("kvstore-0")["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        ask(mesh, greedy, prompt)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: stored(mesh) - before >= num_fillable(len(prompt)) // 16, 20)


def test_the_second_turn_of_a_chat_is_found_elsewhere(mesh: TinyMesh, greedy: Greedy) -> None:
    """The answer of one decode worker is part of the prompt at the other one."""
    prompt = new_prompt(200)
    mesh.wait_empty()
    before = stored(mesh)
    first = ask(mesh, greedy, prompt, NUM_LONG)
    # The last generated token has no KV yet.
    num_pages = (len(prompt) + NUM_LONG - 1) // 16
    wait_until(lambda: stored(mesh) - before >= num_pages, 20)
    tokens: list[int] = []

    def is_found_elsewhere() -> bool:
        flush(mesh)
        # Another end each time: of what was not found, all is put.
        second = ask(mesh, greedy, [*prompt, *first.ids, *new_prompt(20)])
        fills = [fill for fill in second.timeline.fills if fill.source == KVSTORE]
        tokens.append(sum(fill.accepted_tokens for fill in fills))
        # What the store has is of the worker that generated it: nobody puts a page twice.
        elsewhere = second.timeline.worker_id != first.timeline.worker_id
        return elsewhere and tokens[-1] == num_pages * 16

    wait_until(is_found_elsewhere, 60, lambda: str(tokens))


def test_a_prefill_worker_loads_what_it_lacks(mesh: TinyMesh, greedy: Greedy) -> None:
    """After a restart of the prefill worker a prompt is not computed again."""
    prompt = new_prompt(300)
    mesh.wait_empty()
    before = stored(mesh)
    ask(mesh, greedy, prompt)
    wait_until(lambda: stored(mesh) - before >= num_fillable(len(prompt)) // 16, 20)
    epoch = mesh.service("prefill-0")["epoch"]
    os.kill(mesh.service("prefill-0")["pid"], signal.SIGKILL)
    wait_until(lambda: (mesh.ready_file("prefill-0") or {}).get("epoch", epoch) != epoch, 90)
    assert ask_of_store(mesh, greedy, prompt).computed_by_others == 0


def test_without_its_store_the_mesh_goes_on(mesh: TinyMesh, greedy: Greedy) -> None:
    prompt = new_prompt(200)
    ask(mesh, greedy, prompt)
    pid = mesh.service("kvstore-0")["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(pid) or _is_zombie(pid), 10)
    flush(mesh)
    again = ask(mesh, greedy, prompt)
    assert KVSTORE not in [fill.source for fill in again.timeline.fills]
    missed: list[int] = []
    before = stored(mesh, "prefill-0")

    def is_missed() -> bool:
        missed[:] = new_prompt(200)
        return PREFILL in [fill.source for fill in ask(mesh, greedy, missed).timeline.fills]

    wait_until(is_missed, 60)
    wait_until(
        lambda: (mesh.ready_file("kvstore-0") or {}).get("pid", pid) != pid, 60
    )  # restarted by the supervisor

    # The prefill worker has the pages that it could not put, and is asked for them again.
    def is_stored() -> bool:
        for name in mesh.names("decode"):
            mesh.flush(name)
        ask(mesh, greedy, missed)
        return stored(mesh, "prefill-0") - before >= num_fillable(len(missed)) // 16

    wait_until(is_stored, 20)
    # Workers find the new store when they next ask it, and put what it lacks of prompts from then.
    prompt = new_prompt(200)
    ask(mesh, greedy, prompt)
    ask_of_store(mesh, greedy, prompt)
    mesh.wait_idle()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
