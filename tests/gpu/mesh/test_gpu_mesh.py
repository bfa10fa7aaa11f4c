"""A mesh on a GPU that its workers share, with pools of what is free."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import torch
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_calls import Ask, Caller, check_way
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1 import worker_pb2

pytestmark = [pytest.mark.needs("cuda", "nixl", "rest"), pytest.mark.timeout(600)]

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
NUM_PROMPT, NUM_NEW = 700, 12


def pool_gib(mesh: TinyMesh, name: str) -> float:
    """Size of a worker's KV pool, as it tells it."""
    with mesh.worker(name) as stub:
        notices = stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=10).notices
    (size,) = (match[1] for text in notices if (match := re.match(r"KV pool ([\d.]+) GiB", text)))
    return float(size)


@pytest.mark.whole_device
async def test_workers_that_start_at_once_divide_what_is_free(tmp_path: Path) -> None:
    free, total = torch.cuda.mem_get_info()
    flags = ("--device", "cuda", "--prefill", "2", "--decode", "2")
    mesh = TinyMesh(tmp_path, *flags, "--local-prefill-max-tokens", "0")
    try:
        wait_until(lambda: "Weft is ready" in mesh.text, 180, lambda: mesh.text)
        pools = [pool_gib(mesh, name) for name in WORKERS]
        # A quarter each, of which the process, its graphs and a margin take some.
        assert all(0.7 * free < 4 * pool * 2**30 < total for pool in pools), (pools, free)
        prompt = [random.randrange(3, VOCAB) for _ in range(NUM_PROMPT)]
        ask = Ask(prompt=prompt, max_tokens=NUM_NEW, ignore_eos=True)
        async with Caller(mesh) as caller:
            answer = await caller.ask("grpc", ask)
        check_way("nixl", answer)
        Greedy(mesh.model_dir).check(prompt, answer.token_ids or [], NUM_NEW)
        wait_until(lambda: all(mesh.is_idle(name) for name in WORKERS), 30)
    finally:
        mesh.stop()
