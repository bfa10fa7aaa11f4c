"""Engines with pools on GPUs that ship pages to each other, through staging areas."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from weft.contract.messages import Inbox, Outbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Cancel
from weft.engine.loop.engine import Engine
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine, num_quarantined
from weft.testing.engine.engine_storm import Storm, Text
from weft.testing.engine.local_plane import join_planes
from weft.testing.models.float32_reference import ties_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
NUM_NEW = 14
DEVICES = [("cuda:0", "cuda:0"), ("cuda:0", "cuda:1")]
"""Of the owner and of the fillers."""


def gpu_engine(
    model_dir: Path, role: str, clock: ManualClock, device: str, **settings: Any
) -> Engine:
    """An engine whose turns are made on its device."""
    values: dict[str, Any] = {
        "device": device,
        "page_size": PAGE,
        "prefill_chunk_tokens": 2 * PAGE,
        "max_step_tokens": 8 * PAGE,
        "max_running_requests": 8,
        "cuda_graphs": role == "decode",
    }
    engine = make_engine(model_dir, role, clock, **(values | settings))
    turn = engine.turn

    def turn_there(inbox: Inbox | None = None) -> Outbox:
        with torch.cuda.device(device):
            return turn(inbox)

    engine.turn = turn_there  # type: ignore[method-assign]
    return engine


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("tiny"),
        seed=random.randrange(2**31),
        vocab_size=VOCAB,
        head_dim=64,
    )


@pytest.fixture(scope="module", params=DEVICES, ids=["one GPU", "two GPUs"])
def devices(request: pytest.FixtureRequest) -> tuple[str, str]:
    if torch.cuda.device_count() < 2 and "cuda:1" in request.param:
        pytest.skip("there is one GPU")
    devices: tuple[str, str] = request.param
    return devices


@pytest.fixture(
    scope="module",
    params=[
        ("data", "host"),
        ("data", "device"),
        ("local", "host"),
        ("shared", "host"),
        ("shared", "device"),
        pytest.param(("nixl", "host"), marks=pytest.mark.needs("nixl")),
        pytest.param(("nixl", "device"), marks=pytest.mark.needs("nixl")),
    ],
    ids="-".join,
)
def pair(
    model_dir: Path, devices: tuple[str, str], request: pytest.FixtureRequest
) -> Iterator[EnginePair]:
    """`local`: chunks are copied between the staging areas by one write, as over NIXL."""
    transport, memory = request.param
    clock = ManualClock()
    settings = {
        "transport": "data" if transport == "local" else transport,
        "staging_memory": memory,
    }
    owner = gpu_engine(model_dir, "decode", clock, devices[0], **settings)
    fillers = [
        gpu_engine(model_dir, "prefill", clock, devices[1], worker_id=name, **settings)
        for name in ("p0", "p1")
    ]
    if transport == "local":
        join_planes(owner, fillers)
    pair = EnginePair(owner, fillers, clock)
    yield pair
    pair.close()


def new_prompt(num_pages: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(num_pages * PAGE + random.randint(1, PAGE))]


def single_worker(model_dir: Path) -> LLM:
    return LLM(
        model_dir,
        device="cuda:0",
        dtype="float32",
        num_pages=400,
        max_running_requests=8,
        cuda_graphs=False,
    )


def alone(model_dir: Path, prompts: Sequence[list[int]], num_new: int) -> list[list[int]]:
    """What a single worker generates."""
    with single_worker(model_dir) as llm:
        samples = llm.generate(prompts, stop=StopCriteria(max_tokens=num_new, ignore_eos=True))
    return [sample.token_ids for sample in samples]


def check_idle(pair: EnginePair) -> None:
    """Nothing is lost, in the pools and in the staging areas."""
    pair.settle()
    for engine in (pair.owner, *pair.fillers.values()):
        staging = engine.parts.transport.staging_counts()
        assert staging is not None
        assert staging.free == staging.total, staging
        assert num_quarantined(engine) == 0


def test_tokens_equal_a_single_workers(pair: EnginePair, model_dir: Path) -> None:
    prompts = [new_prompt(n) for n in (1, 2, 3, 5, 8, 9, 12, 7)]
    damaged = pair.owner.counters()["digest_mismatches"]
    expected = alone(model_dir, prompts, 40)
    ids = [pair.submit(prompt, max_tokens=40) for prompt in prompts]
    assert pair.finish(*ids) == expected
    for request_id, prompt in zip(ids, prompts, strict=True):
        fills = pair.answers[request_id].finished[0].timeline.fills
        assert sum(fill.accepted_tokens for fill in fills) == len(prompt) // PAGE * PAGE
        assert [fill.failure for fill in fills] == [""] * len(fills)
    again = [pair.submit(prompt, max_tokens=40) for prompt in prompts]
    assert pair.finish(*again) == expected
    assert pair.owner.counters()["digest_mismatches"] == damaged
    check_idle(pair)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_bfloat16_tokens_behind_shipped_pages_are_near_float32s(
    kind: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    path = make_tiny(kind, tmp_path / kind, random.randrange(2**31), vocab_size=VOCAB, head_dim=64)
    clock = ManualClock()
    settings: dict[str, Any] = {"dtype": "bfloat16", "transport": "data"}
    owner = gpu_engine(path, "decode", clock, "cuda:0", **settings, cuda_graphs=cuda_graphs)
    filler = gpu_engine(path, "prefill", clock, "cuda:0", worker_id="p0", **settings)
    pair = EnginePair(owner, [filler], clock)
    try:
        prompts = [new_prompt(n) for n in (1, 2, 3, 5, 8, 12)]
        ids = [pair.submit(prompt, max_tokens=40) for prompt in prompts]
        answers = pair.finish(*ids)
        for request_id, prompt in zip(ids, prompts, strict=True):
            fills = pair.answers[request_id].finished[0].timeline.fills
            accepted = sum(fill.accepted_tokens for fill in fills)
            assert accepted == len(prompt) // PAGE * PAGE
    finally:
        pair.close()
    ties_of(path, prompts, answers).check(is_moe="moe" in kind)


def test_a_corrupt_staging_page_is_detected(pair: EnginePair, model_dir: Path) -> None:
    prompt = new_prompt(6)
    expected = alone(model_dir, [prompt], 20)
    flips = iter([True])
    damaged = pair.owner.counters()["digest_mismatches"]

    def flip(area: np.ndarray, pages: Sequence[int]) -> None:
        if next(flips, False):
            area[pages[-1], random.randrange(area.shape[1])] ^= 1 << random.randrange(8)

    pair.owner.parts.transport.port.before_digest = flip
    request_id = pair.submit(prompt, max_tokens=20)
    assert pair.finish(request_id) == expected
    assert pair.owner.counters()["digest_mismatches"] == damaged + 1
    first, second = pair.answers[request_id].finished[0].timeline.fills
    assert "digest" in first.failure
    assert (second.worker_id, second.failure) == ("p1", "")
    check_idle(pair)


def test_random_cancels_leave_nothing(pair: EnginePair) -> None:
    open_ids: list[str] = []
    for _ in range(200):
        if len(open_ids) < 12:
            open_ids.append(pair.submit(new_prompt(random.randint(1, 12)), max_tokens=6))
        for _ in range(random.randint(0, 3)):
            pair.turn()
        if random.random() < 0.4:
            victim = random.choice(open_ids)
            pair.send(cancels=[Cancel(gateway=1, request_id=victim, attempt=1)])
        open_ids = [i for i in open_ids if not pair.answers[i].finished]
    pair.run(lambda: all(pair.answers[i].finished for i in open_ids))
    assert any(command.action == "stop" for command in pair.commands)
    check_idle(pair)


@pytest.fixture(scope="module")
def texts(model_dir: Path) -> list[Text]:
    stems = [[random.randrange(3, VOCAB) for _ in range(12 * PAGE)] for _ in range(3)]
    made = []
    with single_worker(model_dir) as llm:
        for number in range(16):
            stem = random.choice(stems)[: random.randint(0, 12 * PAGE)]
            prompt = stem + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 3 * PAGE))]
            temperature = 0.0 if number % 2 else 1.0
            sampling = SamplingParams(temperature=temperature, seed=number, n=4)
            stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
            (group,) = llm.generate_all([prompt], sampling, stop)
            samples = tuple(tuple(sample.token_ids) for sample in group)
            made.append(Text(tuple(prompt), sampling, samples))
    return made


def test_a_storm_of_faults_leaves_nothing(
    model_dir: Path, texts: list[Text], devices: tuple[str, str]
) -> None:
    """Freed pages are poisoned: a page that is written or read too early or too late shows."""
    clock = ManualClock()
    page_bytes = 2 * 4 * 64 * PAGE * kv_rows(model_dir)
    shared = {"staging_bytes": 20 * page_bytes, "num_pages": 64}
    owner = gpu_engine(model_dir, "decode", clock, devices[0], has_store=True, **shared)
    fillers = [
        gpu_engine(model_dir, "prefill", clock, devices[1], worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    assert owner.info.page_bytes == page_bytes
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    storm = Storm(owner, fillers, clock, texts, random.Random(seed))
    try:
        while len(storm.sent) < 300:
            for _ in range(storm.rng.randint(0, 2)):
                if storm.num_open < 24:
                    storm.submit_any()
            storm.turn()
        storm.is_calm = True
        storm.paused.clear()
        clock.offset_s += 30
        storm.run(lambda: not storm.num_open, timeout_s=120)
        for _ in range(5):
            clock.offset_s += 2
            storm.run_some(300)
        check_idle(storm)
        for sent in storm.sent:
            sent.check()
        counters = owner.counters()
        print(storm.faults, counters)
        assert counters["fills_done"]
        assert counters["fills_failed"]
        assert counters["store_put_pages"]
    finally:
        storm.close()


def kv_rows(model_dir: Path) -> int:
    """KV heads of all layers."""
    config = json.loads((model_dir / "config.json").read_text())
    return int(config["num_key_value_heads"]) * int(config["num_hidden_layers"])


def test_decode_steps_beside_landing_pages_never_wait(
    pair: EnginePair, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [new_prompt(n) for n in (4, 9, 6, 11, 3, 8)]
    expected = alone(model_dir, prompts, 30)
    warm = new_prompt(3)
    pair.finish(pair.submit(warm, max_tokens=4))
    executor = pair.owner.parts.local
    launch = executor.launch

    def checked(step: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(executor, "launch", checked)
    ids = [pair.submit(prompt, max_tokens=30) for prompt in prompts]
    assert pair.finish(*ids) == expected
    check_idle(pair)
