"""Pages behind sliding windows are freed in a mesh whose prompts prefill workers compute."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_calls import Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy, TinyMesh
from weft.v1.common_pb2 import FILL_SOURCE_KVSTORE

pytestmark = [pytest.mark.full, pytest.mark.needs("go", "nixl"), pytest.mark.timeout(600)]

PAGE, WINDOW, NUM_NEW = 16, 100, 20
SLOW = FaultSpec(point="engine.step", kind="delay", count=0, delay_s=0.2)
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
SHAPE = {"num_hidden_layers": 3, "layer_types": LAYERS, "use_sliding_window": True}


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    mesh = TinyMesh(
        tmp_path_factory.mktemp("mesh"),
        *("--local-prefill-max-tokens", "0", "--transport", "nixl", "--enable-faults"),
        *("--prefill", "2", "--prefill-args", "--prefill-chunk-tokens 64"),
        *("--decode-args", PATIENT),
        kind="qwen2",
        shape={**SHAPE, "sliding_window": WINDOW},
    )
    with mesh.serving():
        yield mesh


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[TinyMesh]:
    """With a KV store, drafts on decode workers and tiers on all."""
    args = "--load-back-threshold 0 --prefill-chunk-tokens 64"
    mesh = TinyMesh(
        tmp_path_factory.mktemp("stored"),
        *("--decode", "2", "--kvstore", "1", "--local-prefill-max-tokens", "0"),
        *("--drafter", "ngram", "--host-cache-bytes", "2000000"),
        *(f"--decode-args={args} {PATIENT}", f"--prefill-args={args}"),
        "--gateway-args=--decode-policy round_robin",
        kind="qwen2",
        shape={**SHAPE, "sliding_window": WINDOW},
    )
    try:
        mesh.wait_ready()
        yield mesh
        assert mesh.stop() == 0, mesh.text
    finally:
        mesh.process.kill()
        mesh.process.wait()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


async def test_shipped_prompts_and_prefixes(mesh: TinyMesh) -> None:
    greedy, stem = Greedy(mesh.model_dir), random_prompt(400)
    prompts = [stem, stem[:230] + random_prompt(80), random_prompt(WINDOW + 1), stem]
    async with Caller(mesh) as caller:
        for prompt in prompts:
            answer = await caller.grpc(Ask(prompt, NUM_NEW, "", ignore_eos=True))
            greedy.check(prompt, answer.token_ids or [], NUM_NEW)

    def are_filled() -> bool:
        return bool(mesh.counters("decode-0")["fills_done"] >= 3)

    # An answer does not wait for the word that its fill is done.
    await asyncio.to_thread(wait_until, are_filled, 30)
    assert not mesh.counters("decode-0")["fills_failed"]
    (counts,) = mesh.dump("decode-0")["engine"]["window_pages"]
    assert counts["used"] == 0
    assert counts["cached"]


async def test_a_prefill_worker_is_killed_within_a_fill(mesh: TinyMesh) -> None:
    greedy, prompt = Greedy(mesh.model_dir), random_prompt(1200)
    before = mesh.counters("decode-0")["accepted_pages"]
    began = {name: mesh.counters(name)["leases_accepted"] for name in ("prefill-0", "prefill-1")}
    for name in began:
        mesh.arm(name, SLOW)
    async with Caller(mesh) as caller:
        task = asyncio.create_task(caller.grpc(Ask(prompt, NUM_NEW, new_salt(), ignore_eos=True)))
        found: list[str] = []

        def has_begun() -> bool:
            has_pages = mesh.counters("decode-0")["accepted_pages"] > before
            found[:] = [n for n, num in began.items() if mesh.counters(n)["leases_accepted"] > num]
            return has_pages and len(found) == 1

        await asyncio.to_thread(wait_until, has_begun, 60)
        assert not task.done(), "the kill comes too late to show anything"
        (filler,) = found
        os.kill(mesh.service(filler)["engine_pid"], signal.SIGKILL)
        (other,) = began.keys() - {filler}
        mesh.disarm(other, SLOW.point)
        answer = await task
    greedy.check(prompt, answer.token_ids or [], NUM_NEW)
    first, second = answer.timeline.fills
    assert (first.worker_id, second.worker_id) == (filler, other)
    assert first.failure
    assert not second.failure


async def test_a_store_brings_the_last_window(stored: TinyMesh) -> None:
    """What one worker computed, another finds, up to where prompts part."""
    greedy, stem = Greedy(stored.model_dir), random_prompt(600)
    workers = (*stored.names("prefill"), *stored.names("decode"))
    found: list[int] = []

    def num_stored() -> int:
        return sum(stored.counters(name)["store_stored_pages"] for name in workers)

    async with Caller(stored) as caller:

        async def ask(prompt: list[int]) -> list[int]:
            """Tokens that came from the store."""
            answer = await caller.grpc(Ask(prompt, NUM_NEW, "", ignore_eos=True))
            greedy.check(prompt, answer.token_ids or [], NUM_NEW)
            fills = [f for f in answer.timeline.fills if f.source == FILL_SOURCE_KVSTORE]
            assert not any(fill.failure for fill in fills)
            return [fill.end_token for fill in fills]

        await ask(stem)
        # A page of the first group, and its page of the window group in two.
        await asyncio.to_thread(wait_until, lambda: num_stored() >= 3 * (600 // PAGE), 60)
        for cut in (600, 410, 123):
            async with asyncio.timeout(120):
                # The store may miss its time on a busy machine.
                while True:
                    for name in workers:
                        stored.flush(name)
                    ends = await ask(stem[:cut] + random_prompt(random.randint(1, 20)))
                    if ends:
                        break
            assert ends[0] == cut // PAGE * PAGE
            found.append(ends[0])
    assert len(found) == 3
    for name in workers:
        (counts,) = stored.dump(name)["engine"]["window_pages"]
        assert counts["used"] == 0
