"""A storm of adapters over a mesh from its beginning to its end, and what must be left of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from weft.testing.meshes.adapter_storm import Storm
from weft.testing.meshes.adapter_texts import AdapterCards
from weft.testing.meshes.local_mesh import wait_until
from weft.testing.meshes.mesh_adapters import copies, held, load, serving, unload, wait_held
from weft.testing.meshes.tiny_mesh import SHAPE, VOCAB, TinyMesh
from weft.testing.models.tiny_adapters import WEIGHTS_FILE, make_adapter
from weft.testing.models.tiny_models import tiny_config
from weft.v1 import worker_pb2

NUM_PROMPT, NUM_PROMPTS, NUM_NEW = 72, 4, 32
CONFIG = tiny_config("llama", **SHAPE)
"""Configuration of the `TinyMesh` model, as far as adapters depend on it."""
FULL_RANK = 16
"""Rank of adapters of which exactly `max_loras` fit."""
MAX_GROWTH_BYTES = 24 << 20
MAX_NEW_FDS = 4
AT_ONCE = 8
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Scale:
    """Sizes of a storm."""

    names: int
    contents: int
    max_loras: int
    host_adapters: int
    """Number of adapters that fit into host memory."""
    clients: int
    operators: int
    seconds: float
    lag_s: float = 0.0
    """Delay with which gateways may see the changes of others."""


def room_flags(scale: Scale, folder: Path) -> str:
    """Flags of workers with room for few adapters, on the device and in host memory."""
    make_adapter(folder, CONFIG, 0, rank=FULL_RANK)
    floats = sum(tensor.numel() for tensor in load_file(folder / WEIGHTS_FILE).values())
    projections = "q,k,v,o,gate,up,down,lm_head"
    return (
        f"--max-loras {scale.max_loras} --max-lora-rank 32 --lora-projections {projections} "
        f"--lora-host-bytes {scale.host_adapters * 4 * floats}"
    )


def weather(mesh: TinyMesh, root: Path, scale: Scale) -> None:
    """A storm; then nothing of it is left. The mesh must have no adapters."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    texts = texts_of(mesh.model_dir, root, seed, scale)
    storm_over(mesh, texts, seed, scale, root)


def texts_of(model_dir: Path, root: Path, seed: int, scale: Scale) -> AdapterCards:
    """The contents, some of them compared with PEFT."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(NUM_PROMPT)] for _ in range(NUM_PROMPTS)]
    texts = AdapterCards(model_dir, CONFIG, root, seed, prompts=prompts, num_new=NUM_NEW)
    texts.add(scale.contents)
    told = [text for row in texts.texts for text in row if text]
    assert len(told) > 0.5 * len(texts.texts) * NUM_PROMPTS, "rounding may change most texts"
    assert len(set(told)) > 0.9 * len(told), "adapters cannot be told apart"
    check_with_peft(model_dir, texts, 2)
    return texts


def check_with_peft(model_dir: Path, texts: AdapterCards, count: int) -> None:
    """Checks that the expected texts are those of PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, texts.folder(0), "0")
    for content in range(count):
        if content:
            model.load_adapter(texts.folder(content), str(content))
        model.set_adapter(str(content))
        out = model.eval().generate(
            torch.tensor(texts.prompts),
            attention_mask=torch.ones(NUM_PROMPTS, NUM_PROMPT),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
        )
        for prompt in range(NUM_PROMPTS):
            if right := texts.texts[content][prompt]:
                assert texts.text(out[prompt, NUM_PROMPT:].tolist()) == right


def storm_over(mesh: TinyMesh, texts: AdapterCards, seed: int, scale: Scale, root: Path) -> None:
    """Loads, uses, changes and unloads all names for a while."""
    workers = [*mesh.names("decode"), *mesh.names("prefill")]
    names = [f"name-{number}" for number in range(scale.names)]
    storm = Storm(mesh, texts, names, seed, NUM_NEW, scale.lag_s)
    storm.load_all(AT_ONCE)
    assert not storm.problems, storm.problems[:5]
    wait_held(mesh, workers, list({digest.hex() for digest in texts.digests[: scale.names]}))
    began = time.monotonic()
    storm.begin(scale.clients, scale.operators)
    before: Holdings | None = None
    while True:
        time.sleep(min(1.0, scale.seconds / 8))
        assert not storm.problems, (storm.problems[:5], storm.counts)
        elapsed_s, counters = time.monotonic() - began, [mesh.counters(name) for name in workers]
        # A busy machine takes longer until everything has happened that is looked for.
        is_seen = have_happened(storm) and have_moved(counters, storm, scale.operators)
        if before is None:
            if is_seen and elapsed_s > scale.seconds / 3:
                before = Holdings.of(mesh)  # Everything has been used by now.
        elif is_seen and elapsed_s > scale.seconds:
            break
        assert elapsed_s < scale.seconds + PATIENCE_S, (storm.counts, counters)
    storm.end()
    assert not storm.problems, (storm.problems[:5], storm.counts)
    counters = [mesh.counters(name) for name in workers]
    storm.unload_all(AT_ONCE)
    assert not storm.problems, storm.problems[:5]
    print({**asdict(scale), **storm.counts, **summed(counters)})
    assert have_happened(storm), storm.counts
    assert have_moved(counters, storm), counters
    check_nothing_left(mesh, workers, root, before, texts)
    check_room(mesh, workers, root, scale, seed)


def summed(counters: Sequence[dict[str, int]]) -> dict[str, int]:
    """Sums the adapter counters of all workers."""
    names = ("adapter_reads", "adapter_writes", "adapter_evictions")
    return {name: sum(one[name] for one in counters) for name in names}


def have_happened(storm: Storm) -> bool:
    """Whether operators have done everything that they do."""
    return all(storm.counts[what] for what in ("loaded", "replaced", "unloaded"))


def have_moved(counters: Sequence[dict[str, int]], storm: Storm, num_under_way: int = 0) -> bool:
    """Whether adapters had to make room for others: on the device of each worker, and in host
    memory, from which some were read again. `num_under_way`: loads that may end meanwhile.
    """
    num_loads = storm.counts["loaded"] + storm.counts["replaced"] + num_under_way
    return all(one["adapter_evictions"] > 0 for one in counters) and any(
        one["adapter_reads"] > num_loads for one in counters
    )


@dataclass(frozen=True)
class Holdings:
    """System resources held by the processes of a mesh."""

    memory_bytes: dict[int, int]
    """Private memory by process id."""
    fds: dict[str, int]

    @classmethod
    def of(cls, mesh: TinyMesh) -> Holdings:
        """The present values."""
        memory = {one.pid: one.memory_full_info().uss for one in mesh.family()}
        return cls(memory, mesh.fds())


def check_nothing_left(
    mesh: TinyMesh, workers: Sequence[str], root: Path, before: Holdings, texts: AdapterCards
) -> None:
    """Checks that no content, copy, request, file or memory is left."""
    wait_held(mesh, workers, [])
    wait_until(lambda: not copies(root), 30)
    assert serving(mesh) == {}
    mesh.wait_empty()
    after = Holdings.of(mesh)
    assert after.memory_bytes.keys() == before.memory_bytes.keys(), "a process died"
    growth = {pid: after.memory_bytes[pid] - size for pid, size in before.memory_bytes.items()}
    print(f"most growth {max(growth.values()) / 2**20:.1f} MiB")
    assert max(growth.values()) < MAX_GROWTH_BYTES, growth
    more = {name: after.fds[name] - count for name, count in before.fds.items()}
    assert max(more.values()) <= MAX_NEW_FDS, more


def check_room(mesh: TinyMesh, workers: Sequence[str], root: Path, scale: Scale, seed: int) -> None:
    """Checks that as many adapters as ever fit on the device again: no row or place is lost."""
    for number in range(scale.max_loras):
        make_adapter(root / f"full-{number}", CONFIG, seed + number, rank=FULL_RANK)
        is_pinned = number < scale.max_loras - 1  # All but one may be.
        answer = load(mesh, f"full-{number}", f"full-{number}", pinned=is_pinned)
        assert answer.status_code == 200, answer.text

    def states() -> list[set[int]]:
        return [{one.state for one in mesh.load(name).adapters} for name in workers]

    device = worker_pb2.ADAPTER_STATE_DEVICE
    wait_until(lambda: all(found == {device} for found in states()), 30, lambda: str(states()))
    assert all(len(held(mesh, name)) == scale.max_loras for name in workers)
    for number in range(scale.max_loras):
        assert unload(mesh, f"full-{number}").status_code == 200
