"""Weights that a trainer on another GPU, if there is one, broadcasts over NCCL, in both of the
trainers' forms.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import GroupFailed, WeightsIncomplete
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightGroup
from weft.engine.loop.llm import LLM
from weft.testing.engine.nccl_members import one_of_two
from weft.testing.models.senders import described, free_port, tensors_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

PROMPTS = [list(range(3, 43)), list(range(5, 20))]
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_pages": 256, "device": "cuda:0"}

TRAINER = """
import ctypes, signal, sys
from datetime import timedelta
from pathlib import Path
import torch
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from weft.engine.parallel.nccl import Communicator, _Id
from weft.testing.models.senders import tensors_of

form, port, folder, share = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
device = torch.device("cuda", torch.cuda.device_count() - 1)
torch.cuda.set_device(device)
sent = [one.to(device) for one in tensors_of(folder).values()]
if form == "vllm":
    number = _Id()
    ctypes.CDLL("libnccl.so.2").ncclGetUniqueId(ctypes.byref(number))
    print(bytes(number).hex(), flush=True)
    group = Communicator(bytes(number), 0, 2, device, 60.0)
    group.all_reduce(torch.zeros(1, device=device))
    send = group.broadcast
else:
    wait = timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
    store = c10d.PrefixStore("trainer", store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("nccl"), store, group_name="trainer", timeout=wait, group_desc="w"
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    send = lambda one: torch.distributed.broadcast(one, 0, group=group)
for one in sent[: int(share * len(sent))]:
    send(one)
torch.cuda.synchronize()
print("sent", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def member(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in one_of_two("worker").items():
        monkeypatch.setenv(name, value)


def trainer(form: str, port: int, folder: Path, share: float = 1.0) -> subprocess.Popen[str]:
    script = textwrap.dedent(TRAINER)
    return subprocess.Popen(
        [sys.executable, "-c", script, form, str(port), str(folder), str(share)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | one_of_two("trainer"),
    )


def group_of(form: str, port: int, process: subprocess.Popen[str], wait_s: float) -> WeightGroup:
    number = b""
    if form == "vllm":
        assert process.stdout is not None
        number = bytes.fromhex(process.stdout.readline())
    return WeightGroup(
        name="trainer",
        address="127.0.0.1",
        port=port,
        rank=1,
        size=2,
        backend="nccl",
        rendezvous="vllm" if form == "vllm" else "torch",
        nccl_id=number,
        wait_s=wait_s,
    )


def texts(llm: LLM) -> list[list[int]]:
    return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]


@pytest.mark.parametrize("form", ["torch", "vllm"])
def test_weights_over_nccl_are_a_fresh_loads(form: str, tmp_path: Path) -> None:
    first, second = (make_tiny("llama", tmp_path / str(seed), seed) for seed in (1, 2))
    with LLM(second, **SETTINGS) as fresh:
        right, packed = texts(fresh), fresh.engine.parts.local.refits.packed_digest()
    process = trainer(form, port := free_port(), second)
    try:
        with LLM(first, **SETTINGS) as llm:
            assert texts(llm) != right
            llm.command_weights("join", group=group_of(form, port, process, 60.0))
            tensors = described(tensors_of(second))
            llm.command_weights("receive", group_name="trainer", tensors=tensors)
            assert llm.weights.state == "ready"
            assert llm.engine.parts.local.refits.packed_digest() == packed
            assert texts(llm) == right
            llm.command_weights("leave", group_name="trainer")
    finally:
        process.kill()
        process.wait(60)


@pytest.mark.parametrize("form", ["torch", "vllm"])
def test_a_trainer_that_stops_in_the_middle_leaves_a_worker_that_says_so(
    form: str, tmp_path: Path
) -> None:
    first, second = (make_tiny("llama", tmp_path / str(seed), seed) for seed in (1, 2))
    process = trainer(form, port := free_port(), second, 0.5)
    try:
        with LLM(first, **SETTINGS) as llm:
            right = texts(llm)
            llm.command_weights("join", group=group_of(form, port, process, 10.0))
            tensors = described(tensors_of(second))
            with pytest.raises(GroupFailed, match="did not end"):
                llm.command_weights("receive", group_name="trainer", tensors=tensors)
            with pytest.raises(WeightsIncomplete):
                texts(llm)
            llm.refit(first)
            assert texts(llm) == right
    finally:
        process.kill()
        process.wait(60)
