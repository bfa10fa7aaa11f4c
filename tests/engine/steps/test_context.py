"""Prefill workers whose ranks divide prompts fill the pages that one process fills."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import psutil
import pytest
import torch
from weft.checkpoint.adapters.rows import DevicePlace
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError, RanksLost
from weft.engine.base.config import EngineConfig
from weft.engine.base.device_copies import Mark
from weft.engine.executor.adapter_rows import make_lora_pool
from weft.engine.executor.local import LocalExecutor, RankPool
from weft.engine.executor.ranks import context
from weft.engine.executor.ranks.context import (
    LEAST_ROWS,
    ContextExecutor,
    DeviceGather,
    is_divided,
    launch_share,
    share_of,
)
from weft.engine.executor.ranks.frames import Barrier, Frame, decode
from weft.engine.executor.step_input import StepInput
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.engine import Engine
from weft.engine.model.loader import load_model
from weft.engine.model.step import Step
from weft.engine.transfer.device_pages import DevicePages, PagePart, rows_of_pool
from weft.pages.memory.page_table import PageTable
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.lora_reference import PeftModels, load
from weft.testing.models.moe_families import MOE_FAMILIES, make_any_family
from weft.testing.models.tiny_models import make_tiny

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
FULL = pytest.mark.full


def turn_on_and_on(engine: Engine) -> None:
    deadline = time.monotonic() + 120.0
    while time.monotonic() < deadline:
        engine.turn()


class Divided:
    """A decode worker and a prefill worker with ranks."""

    def __init__(self, folder: Path, cp: int, **settings: Any) -> None:
        one = {"num_threads": 1} | settings
        clock = ManualClock()
        own = {"worker_id": "p0", "prefill_chunk_tokens": 128, "max_step_tokens": 256}
        own |= {"cp_least_tokens": 2 * LEAST_ROWS * cp}
        self.filler = make_engine(folder, "prefill", clock, cp=cp, **own, **one)
        self.pair = EnginePair(make_engine(folder, "decode", clock, **one), [self.filler], clock)
        self.rows = list[int]()
        """Rows of rank 0 in each divided step."""
        local = self.filler.parts.local
        launch = local.launch

        def note(step: StepInput) -> Any:
            if step.is_divided:
                self.rows.append(step.num_rows)
            return launch(step)

        local.launch = note  # type: ignore[method-assign]

    def check(self, prompt: Sequence[int], **asked: Any) -> None:
        """The text after a shipped prompt is the decode worker's own."""
        pair = self.pair
        (alone,) = pair.finish(pair.submit(list(prompt), candidates=[], **asked))
        pair.owner.memory.flush_cache()
        request_id = pair.submit(list(prompt), **asked)
        assert pair.finish(request_id) == [alone]
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        assert fill.failure == ""
        assert fill.accepted_tokens >= (len(prompt) - 1) // PAGE * PAGE


def random_prompt(length: int, vocab: int = 250) -> list[int]:
    return [random.randrange(3, vocab) for _ in range(length)]


def check_model(folder: Path, cp: int, vocab: int = 250, **settings: Any) -> None:
    workers = Divided(folder, cp, **settings)
    try:
        prompt = random_prompt(random.randint(290, 400), vocab)
        workers.check(prompt)
        workers.check(prompt[:200] + random_prompt(150, vocab))  # After a prefix hit.
        workers.check(random_prompt(20, vocab))  # Too short to be divided.
        assert len(workers.rows) >= 2
        assert max(workers.rows) <= -(-256 // cp) + LEAST_ROWS
        workers.pair.settle()
    finally:
        workers.pair.close()


@pytest.mark.parametrize(
    ("kind", "cp"),
    [("llama", 2), *(pytest.param(*one, marks=FULL) for one in [("mistral", 3), ("qwen3_moe", 2)])],
)
def test_shipped_prompts_have_the_text_of_one_process(
    kind: str, cp: int, tmp_path: Path, seed: int
) -> None:
    check_model(make_tiny(kind, tmp_path, seed), cp)


@FULL
@pytest.mark.parametrize("name", [*FAMILIES, *MOE_FAMILIES])
def test_prompts_of_other_families_have_the_text_of_one_process(
    name: str, tmp_path: Path, seed: int
) -> None:
    """With latents, windows, experts and heads of several shapes."""
    folder = tmp_path / "model"
    make_any_family(name, folder, seed)
    settings = {"language_model_only": True}
    try:
        check_combination(EngineConfig(model_dir=folder, role="prefill", cp=2, **settings))
    except ConfigError as error:
        pytest.skip(f"not divided: {error}")
    most = ModelConfig.load(folder).max_position_embeddings
    if most < 450:
        pytest.skip(f"prompts of {most} tokens are not long")
    check_model(folder, 2, **settings)


@FULL
@pytest.mark.parametrize("form", ["fp8", "int8", "8-bit KV"])
def test_prompts_of_quantised_models(form: str, tmp_path: Path, seed: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 128}
    folder = make_tiny("llama", tmp_path / "model", seed, **sizes)
    if form == "fp8":
        check_model(fp8_copy(folder, tmp_path / "fp8", "blocks")[0], 2)
    elif form == "int8":
        check_model(folder, 2, quantization="int8")
    else:
        check_model(folder, 2, kv_dtype="int8")


@FULL
def test_prompts_with_adapters(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path / "model", seed)
    models = PeftModels(folder, tmp_path)
    models.add(seed, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    names = ("q", "k", "v", "o", "gate", "up", "down")
    workers = Divided(folder, 2, enable_lora=True, max_loras=2, lora_projections=names)
    try:
        (digest,) = models.digests
        for engine in (workers.pair.owner, workers.filler):
            load(engine, next(iter(models.directories.values())))
        workers.check(random_prompt(300), adapter=digest)
    finally:
        workers.pair.close()


class _Clocked:
    """An executor whose chunks take as long as a function of their rows says."""

    def __init__(self, alone: Any, together: Any) -> None:
        self.now = 0.0
        self.gather = None
        self.page_table = PageTable(2, 4, keeps_changes=False)
        self._took = alone, together

    def launch(self, step: StepInput) -> None:
        self.now += self._took[step.is_divided](step.num_rows)

    def mark(self) -> Any:
        return Mark(torch.device("cpu"))


@pytest.mark.parametrize(("slope", "least"), [(0.4, 256), (0.9, 1024), (1.1, None)])
def test_chunks_are_divided_from_where_on_that_is_faster(
    slope: float, least: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together two ranks take 100 and `slope` for each row of the whole chunk, one takes 1 each."""
    size, most = 2, 1504
    executor = _Clocked(lambda rows: rows, lambda rows: 100 + slope * size * rows)
    monkeypatch.setattr(context.time, "perf_counter", lambda: executor.now)
    ranks = SimpleNamespace(rank=0, size=size, agree=lambda phase, number=0, text="": number)
    config = EngineConfig(
        model_dir=tmp_path, cp=size, prefill_chunk_tokens=most, max_step_tokens=most
    )
    found = context.least_divided(config, executor, ranks)  # type: ignore[arg-type]
    assert found == (most + 1 if least is None else least)
    config = replace(config, cp_least_tokens=99)
    assert context.least_divided(config, executor, ranks) == 99  # type: ignore[arg-type]


@FULL
def test_a_worker_times_at_its_start_from_where_on_it_divides(tmp_path: Path, seed: int) -> None:
    folder = make_tiny("llama", tmp_path, seed)
    sizes = {"prefill_chunk_tokens": 512, "max_step_tokens": 512}
    engine = make_engine(folder, "prefill", ManualClock(), cp=2, num_threads=1, **sizes)
    try:
        (told,) = (one for one in engine.info.notices if "divided from" in one)
        assert int(told.split()[6]) in (64, 128, 256, 512, 513)
    finally:
        engine.close()


@FULL
def test_a_lost_rank_ends_the_worker(tmp_path: Path, seed: int) -> None:
    folder, before = make_tiny("llama", tmp_path, seed), psutil.Process().children()
    clock = ManualClock()
    engine = make_engine(folder, "prefill", clock, cp=2, num_threads=1)
    try:
        (rank,) = [one for one in psutil.Process().children() if one not in before]
        rank.kill()
        with pytest.raises(RanksLost, match=r"rank 1.*signal 9"):
            turn_on_and_on(engine)
    finally:
        engine.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_have_all_rows_between_them_and_about_as_much_attention(size: int) -> None:
    counts = np.array([1, random.randint(1, 20), random.randint(400, 900), 500], np.int64)
    starts = np.array([random.randrange(1000) for _ in counts], np.int64)
    tokens = np.arange(int(counts.sum()))
    step = StepInput(
        slots=np.arange(4),
        starts=starts,
        max_starts=starts,
        counts=counts,
        draws=np.array([1, 0, 1, 0]),
        recomputed_rows=np.array([0, 0, 60, 0]),
        tokens=tokens,
    )
    least = 2 * size * LEAST_ROWS
    assert is_divided(step, least)
    assert not is_divided(StepInput(**{**_fields(step), "counts": np.minimum(counts, 20)}), least)
    found, attended = list[tuple[int, int, int]](), list[int]()
    for rank in range(size):
        share = share_of(step, rank, size, least)
        assert share is not None
        own = [
            (slot, int(position))
            for slot, start, count in zip(share.slots, share.starts, share.counts, strict=True)
            for position in range(int(start), int(start + count))
        ]
        found += [(*row, int(token)) for row, token in zip(own, share.tokens, strict=True)]
        if rank:
            assert not share.draws.any()
        else:
            assert share.slots[share.draws > 0].tolist() == [0, 2]
        long = [(slot, position) for slot, position in own if slot > 1]
        attended.append(sum(position for _, position in long))
    wanted = [
        (slot, int(position))
        for slot in range(4)
        for position in range(int(starts[slot]), int(starts[slot] + counts[slot]))
    ]
    assert sorted(found) == [(*row, token) for row, token in zip(wanted, tokens, strict=True)]
    assert max(attended) < 1.1 * min(attended)
    recomputed = 0
    for rank in range(size):
        share = share_of(step, rank, size, least)
        assert share is not None
        recomputed += int(share.recomputed_rows.sum())
    assert recomputed == 60


class _Pools:
    """Copies entries as `weft.kernels.ops.pages.triton_push.PeerPools` does."""

    def __init__(self, pools: Sequence[torch.Tensor], rank: int) -> None:
        self._pools, self._rank = pools, rank
        self.num_layers = pools[rank].shape[2]

    def push(self, places: torch.Tensor, layers: range) -> None:
        size = self._pools[0].shape[4]
        pages, offsets = places // size, places % size
        for rank, pool in enumerate(self._pools):
            for layer in layers if rank != self._rank else ():
                pool[pages, :, layer, :, offsets] = self._pools[self._rank][
                    pages, :, layer, :, offsets
                ]


class _Gather(DeviceGather):
    """As on GPUs, with threads in place of them."""

    def __init__(self, meet: Callable[[], object], pools: list[torch.Tensor], rank: int) -> None:
        self.meet = meet  # type: ignore[method-assign, assignment]
        self._pools: Any = _Pools(pools, rank)

    def __call__(self, mixer: Any, step: Step, pool: torch.Tensor) -> None:
        self._pools.push(step.groups[0].places, range(mixer.in_pool, mixer.in_pool + 1))
        self.meet()


class _Noted:
    """What rank 0 posts, and how often it has met the others."""

    num_met, num_frames = 0, 0

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def post(self, frame: Frame) -> None:
        self.frames.append(frame)

    def meet(self) -> None:
        self.num_met += 1


@pytest.mark.parametrize("is_filled", [True, False])
def test_marks_follow_all_ranks_where_pages_come_from_elsewhere(
    is_filled: bool, tmp_path: Path, seed: int
) -> None:
    """Rank 0 then writes such pages to the pools of all ranks, whose orders must have ended."""
    model = load_model(make_tiny("llama", tmp_path, seed), "float32", "cpu").model
    layout, noted = model.kv_layout(PAGE), _Noted()
    pools = [torch.zeros(layout.pool_shape(20)) for _ in range(2)]
    parts = [PagePart(pool, 0, is_copy=pool is not pools[0]) for pool in pools]
    pool = RankPool(pools[0], pools[0], DevicePages(parts) if is_filled else None)
    sizes = layout, 20, 3, 64, torch.device("cpu")
    local = LocalExecutor(model, *sizes, max_step_tokens=64, pool=pool)
    local.gather = _Gather(noted.meet, pools, 0)
    ranks: Any = SimpleNamespace(group=noted)
    executor = ContextExecutor(local, ranks, cast("DevicePeers", noted), 64)
    executor.mark().wait()
    frames = [decode(np.concatenate(frame)) for frame in noted.frames]
    assert frames == ([Barrier()] if is_filled else [])
    assert noted.num_met == len(frames)
    page = local.page_pool()
    page.target(0, 7)[:] = sent = np.frombuffer(random.randbytes(layout.page_bytes), np.uint8)
    page.commit([7])
    found = [rows_of_pool(one)[7].numpy().tolist() for one in pools]
    assert found == [sent.tolist(), sent.tolist() if is_filled else [0] * len(sent)]


def test_ranks_with_memory_of_their_own_get_whole_adapters(tmp_path: Path, seed: int) -> None:
    """As on GPUs, where rank 0 writes them to the memory of all ranks that divide prompts."""
    folder = make_tiny("llama", tmp_path / "model", seed)
    models = PeftModels(folder, tmp_path)
    models.add(seed, r=12, target_modules=["q_proj", "down_proj"])
    config = EngineConfig(model_dir=folder, enable_lora=True, max_loras=2, dtype="float32")
    memories = list[torch.Tensor]()

    def memory(num_bytes: int) -> list[torch.Tensor]:
        memories.extend(torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(3))
        return memories

    ranks: Any = SimpleNamespace(rank=1, size=1, memory=memory, publish=lambda: None)
    loaded = load_model(folder, "float32", "cpu")
    pool = make_lora_pool(config, loaded, torch.device("cpu"), ranks=ranks)
    assert pool is not None
    weights = pool.read(str(*models.directories.values()), is_lenient=False)
    rows = {kind: np.arange(count, dtype=np.int32) for kind, count in weights.needs.items()}
    pool.write(DevicePlace(1, rows), weights)
    assert memories[0].any()
    for other in memories[1:]:
        assert torch.equal(other, memories[0])


def _step(*chunks: tuple[int, int, int], draws: Sequence[int], decodes: int = 0) -> StepInput:
    """Of (slot, start, rows) each, decodes first, with random tokens."""
    slots, starts, counts = (np.array(column, np.int64) for column in zip(*chunks, strict=True))
    tokens = np.array(random_prompt(int(counts.sum())), np.int64)
    return StepInput(
        slots=slots,
        starts=starts,
        max_starts=starts,
        counts=counts,
        num_decodes=decodes,
        draws=np.array(draws, np.int64),
        recomputed_rows=np.zeros(len(draws), np.int64),
        tokens=tokens[decodes:],
        decode_tokens=tokens[:decodes] if decodes else None,
    )


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=FULL) for kind in ("mistral", "qwen3_moe"))]
)
def test_ranks_with_pools_of_their_own_have_the_same_whole_pages(
    kind: str, tmp_path: Path, seed: int
) -> None:
    """As on GPUs: steps that are divided, and ones that rank 0 computes alone."""
    folder, size = make_tiny(kind, tmp_path, seed), 2
    models = [load_model(folder, "float32", "cpu").model for _ in range(1 + size)]
    layout, meet = models[0].kv_layout(PAGE), partial(threading.Barrier(size).wait, 60.0)
    pools = [torch.zeros(layout.pool_shape(130)) for _ in range(1 + size)]
    sizes = layout, 130, 3, 64 * PAGE, torch.device("cpu")
    alone, *ranks = (
        LocalExecutor(model, *sizes, max_step_tokens=512, pool=RankPool(pool, pool), rank=rank)
        for rank, (model, pool) in enumerate(zip(models, pools, strict=True), -1)
    )
    pages = np.random.permutation(np.arange(1, 129)).reshape(2, 64)
    for rank, executor in enumerate([alone, *ranks], -1):
        executor.gather = _Gather(meet, pools[1:], rank) if rank >= 0 else None
        for slot, own in enumerate(pages.tolist()):
            executor.page_table.extend(slot, own)
    steps = [
        _step((0, 0, 200), (1, 0, 30), draws=(0, 1)),
        _step((0, 200, 133), (1, 30, 90), draws=(1, 0)),
        _step((0, 333, 1), draws=(), decodes=1),
        _step((0, 334, 150), (1, 120, 10), draws=(1, 1)),
        _step((1, 130, 1), (0, 484, 20), draws=(0,), decodes=1),
        _step((1, 131, 128), draws=(1,)),
    ]
    least = 2 * size * LEAST_ROWS
    for step in steps:
        other = threading.Thread(target=launch_share, args=(ranks[1], step, 1, size, least))
        other.start()
        launched = launch_share(ranks[0], step, 0, size, least)
        other.join(60.0)
        wanted = alone.launch(step).logits
        assert launched is not None
        assert launched.logits is not None
        assert wanted is not None
        assert launched.logits.slots.tolist() == wanted.slots.tolist()
        assert launched.logits.positions.tolist() == wanted.positions.tolist()
        torch.testing.assert_close(
            launched.logits.compute(), wanted.compute(), atol=1e-4, rtol=1e-4
        )
    assert torch.equal(pools[1][1:], pools[2][1:])
    torch.testing.assert_close(pools[1][1:], pools[0][1:], atol=1e-4, rtol=1e-4)


def _fields(step: StepInput) -> dict[str, Any]:
    names = ("slots", "starts", "max_starts", "counts", "draws", "recomputed_rows", "tokens")
    return {name: getattr(step, name) for name in names}


def test_what_ranks_do_not_divide_is_refused_with_its_reason(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "llama", 0)
    clock = ManualClock()
    with pytest.raises(ConfigError, match="1 with drafts"):
        make_engine(folder, "decode", clock, cp=2, drafter="ngram")
    with pytest.raises(ConfigError, match="1 with tp or pp"):
        make_engine(folder, "prefill", clock, cp=2, tp=2)
    hybrid = tmp_path / "hybrid"
    make_family("nemotron_h", hybrid, 0)
    with pytest.raises(ConfigError, match=r"recurrent layers pass a state.*take pp"):
        make_engine(hybrid, "prefill", clock, cp=2)
