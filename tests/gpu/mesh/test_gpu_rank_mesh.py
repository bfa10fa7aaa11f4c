"""A worker with ranks or stages on GPUs takes pages from one of one GPU. Under load it loses ranks,
and is back each time, as are workers that share experts.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import psutil
import pytest
from weft.testing.engine.ranked_texts import gpus_of_ranks
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_calls import Ask, Caller, check_way, new_salt
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import MODEL, VOCAB, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = [pytest.mark.needs("cuda", "rest"), pytest.mark.timeout(600)]

NUM_KILLS, NUM_NEW = 5, 24
LIMIT_S = 3.0
SHARED_LIMIT_S = 8.0
"""Longest wait of workers that share experts, of which one alone may compile kernels."""
SMALL = "--num-pages 200 --max-running-requests 4 --max-step-tokens 128 --prefill-chunk-tokens 64"


class Load:
    """Clients that ask for texts that are known, until `stop`."""

    def __init__(self, mesh: TinyMesh) -> None:
        greedy = Greedy(mesh.model_dir)
        self._url = f"{mesh.url}/v1/completions"
        lengths = [random.randint(1, 150) for _ in range(6)]
        prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in lengths]
        self._right = [(one, greedy.text(greedy.ids(one, NUM_NEW))) for one in prompts]
        self.num_right = self.num_failed = 0
        self.wrong: list[str] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(3)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        with httpx.Client(timeout=60, trust_env=False) as client:
            while not self._stopped.is_set():
                prompt, right = random.choice(self._right)
                body = {"model": MODEL, "prompt": prompt, "max_tokens": NUM_NEW}
                body |= {"temperature": 0, "ignore_eos": True}
                try:
                    answer = client.post(self._url, json=body)
                except httpx.TransportError:
                    answer = None
                if answer is None or answer.status_code != 200:
                    self.num_failed += 1
                    time.sleep(0.1)
                elif (text := answer.json()["choices"][0]["text"]) == right:
                    self.num_right += 1
                else:
                    self.wrong.append(f"{text!r} is not {right!r}")

    def stop(self) -> None:
        """Ends all clients."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()


def lose_a_rank(mesh: TinyMesh, load: Load) -> str:
    """Kills or stops one of the ranks; returns once the worker answers again."""
    with mesh.worker("decode-0") as stub:
        first = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=30).engine_pid
    children = psutil.Process(first).children()
    others = [child for child in children if "rank_process" in " ".join(child.cmdline())]
    ranks = [psutil.Process(first), *others]
    before, told = mesh.service("decode-0")["epoch"], len(mesh.log("decode-0"))
    lost = random.choice(ranks)
    is_first = lost.pid == first
    how = signal.SIGKILL if is_first else random.choice((signal.SIGKILL, signal.SIGSTOP))
    time.sleep(random.uniform(0.0, 1.0))
    os.kill(lost.pid, how)
    lost_at = time.monotonic()
    wait_until(lambda: not any(one.is_running() for one in ranks), LIMIT_S + 10)
    ended_s = time.monotonic() - lost_at
    if not is_first:
        log = mesh.log("decode-0")[told:]
        assert re.search(r"rank [1-9] .*step", log), log

    def is_back() -> bool:
        ready = mesh.ready_file("decode-0")
        return ready is not None and ready["epoch"] != before

    wait_until(is_back, 120, lambda: mesh.text)
    answered = load.num_right
    wait_until(lambda: load.num_right > answered, 60, lambda: mesh.text)
    back_s = time.monotonic() - lost_at
    which = "first rank" if is_first else "other rank"
    return f"{which} by {how.name}: ended after {ended_s:.1f} s, back after {back_s:.1f} s"


NIXL = pytest.param("nixl", marks=pytest.mark.needs("nixl"))


@pytest.mark.parametrize("transport", ["data", NIXL])
@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("filler", [1, 2])
async def test_prompts_are_filled_by_workers_of_any_number_of_ranks(
    filler: int, has_head: bool, transport: str, tmp_path: Path
) -> None:
    await check_filled(filler, 3 - filler, has_head, transport, tmp_path)


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("filler", "owner", "transport"),
    [
        pytest.param(4, 2, "nixl", marks=pytest.mark.needs("nixl")),
        pytest.param(2, 4, "nixl", marks=pytest.mark.needs("nixl")),
        pytest.param(2, 2, "nixl", marks=pytest.mark.needs("nixl")),
        (4, 1, "data"),
        (1, 4, "data"),
        (4, 4, "data"),
    ],
)
async def test_prompts_are_filled_by_four_ranks(
    filler: int, owner: int, transport: str, tmp_path: Path
) -> None:
    await check_filled(filler, owner, False, transport, tmp_path)


@pytest.mark.parametrize("transport", ["data", NIXL])
@pytest.mark.parametrize("filler", [1, 2])
async def test_prompts_are_filled_by_workers_of_any_number_of_stages(
    filler: int, transport: str, tmp_path: Path
) -> None:
    await check_filled(filler, 3 - filler, False, transport, tmp_path, "pp")


async def check_filled(
    filler: int, owner: int, has_head: bool, transport: str, folder: Path, divides: str = "tp"
) -> None:
    """Texts of a worker whose prompts another one computes, on other GPUs where there are
    enough.
    """
    of_owner, of_filler = (
        f"--{divides} {size} --device {gpus_of_ranks(size, first)}"
        for size, first in ((owner, 0), (filler, owner))
    )
    flags = (f"--{divides}", "2", "--device", gpus_of_ranks(2))
    flags += ("--local-prefill-max-tokens", "0", "--transport", transport)
    flags += ("--prefill-args", f"{SMALL} {of_filler}")
    drafts = " --drafter eagle3 --draft-gate fixed" if has_head else ""
    flags += ("--decode-args", f"{SMALL} {of_owner} {PATIENT}{drafts}")
    shape = {"num_hidden_layers": 3} if divides == "pp" else None
    mesh = TinyMesh(folder, *flags, has_draft=has_head, num_heads=8, shape=shape)
    try:
        mesh.wait_ready()
        greedy = Greedy(mesh.model_dir)
        async with Caller(mesh) as caller:
            for length in (300, 70, 155):
                # A step that took long, as the first may, makes its worker unfit for a moment.
                mesh.wait_healthy()
                prompt = [random.randrange(3, VOCAB) for _ in range(length)]
                ask = Ask(prompt, NUM_NEW, new_salt(), ignore_eos=True)
                answer = await caller.ask("grpc", ask)
                check_way(transport, answer)
                greedy.check(prompt, answer.token_ids or [], NUM_NEW)
    finally:
        mesh.stop()


@pytest.mark.full_after(1)
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_that_are_lost_under_load_come_back_without_a_wrong_text(
    size: int, part: int, tmp_path: Path
) -> None:
    flags = ("--tp", str(size), "--device", gpus_of_ranks(size), "--prefill", "0")
    args = f"{SMALL} --rank-timeout-s {LIMIT_S:g}"
    mesh = TinyMesh(tmp_path, *flags, "--decode-args", args, num_heads=8)
    load: Load | None = None
    try:
        mesh.wait_ready()
        load = Load(mesh)
        wait_until(lambda: load.num_right > 3, 60, lambda: mesh.text)
        for _ in range(NUM_KILLS):
            print(lose_a_rank(mesh, load))
    finally:
        if load is not None:
            load.stop()
        mesh.stop()
    print(f"part {part}: {load.num_right} right, {load.num_failed} failed")
    assert not load.wrong


def lose_a_worker(mesh: TinyMesh) -> str:
    """Kills or stops one of the workers that share experts; returns once all are back."""
    names = mesh.names("decode")
    before = {name: mesh.service(name) for name in names}
    lost, *others = random.sample(names, len(names))
    how = random.choice((signal.SIGKILL, signal.SIGSTOP))
    time.sleep(random.uniform(0.0, 1.0))
    os.kill(before[lost]["engine_pid"], how)
    lost_at = time.monotonic()
    pids = [before[name]["engine_pid"] for name in others]
    wait_until(
        lambda: not any(map(psutil.pid_exists, pids)), SHARED_LIMIT_S + 10, lambda: mesh.text
    )
    ended_s = time.monotonic() - lost_at
    if how == signal.SIGSTOP:
        os.kill(before[lost]["engine_pid"], signal.SIGCONT)

    def is_back(name: str) -> bool:
        ready = mesh.ready_file(name)
        return ready is not None and ready["epoch"] != before[name]["epoch"]

    wait_until(lambda: all(map(is_back, names)), 120, lambda: mesh.text)
    return f"{lost} by {how.name}: the others ended after {ended_s:.1f} s"


def wait_for_answers(mesh: TinyMesh, load: Load) -> None:
    """Returns once some more requests have been answered."""
    answered = load.num_right
    wait_until(lambda: load.num_right > answered + 3, 60, lambda: mesh.text)


def test_workers_that_share_experts_end_together_and_come_back(tmp_path: Path) -> None:
    flags = ("--prefill", "0", "--decode", "2", "--attention-dp", "2", "--device")
    args = f"{SMALL} --rank-timeout-s {SHARED_LIMIT_S:g}"
    shape = {"num_experts": 8, "num_hidden_layers": 2}
    devices = gpus_of_ranks(2).split(",")
    mesh = TinyMesh(
        tmp_path, *flags, *devices, "--decode-args", args, kind="qwen3_moe", shape=shape
    )
    load: Load | None = None
    try:
        mesh.wait_ready()
        load = Load(mesh)
        for _ in range(2):
            wait_for_answers(mesh, load)
            sent = [mesh.counters(name)["dispatched_rows"] for name in mesh.names("decode")]
            assert all(rows > 0 for rows in sent)
            print(lose_a_worker(mesh))
        wait_for_answers(mesh, load)
    finally:
        if load is not None:
            load.stop()
        mesh.stop()
    print(f"{load.num_right} right, {load.num_failed} failed")
    assert not load.wrong
