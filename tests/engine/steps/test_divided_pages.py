"""Ranks that divide the pages of their KV heads make the text that one process makes."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from weft.contract.errors import ConfigError, RanksLost
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.base.config import EngineConfig
from weft.engine.executor.ranks import start
from weft.engine.loop.combinations import check_combination
from weft.engine.loop.llm import LLM
from weft.engine.parallel.shards import num_pages_here, num_pages_of_all
from weft.kernels.ops.divided_pages import number_here
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import TierBench
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.lora_reference import PeftModels
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

FULL = pytest.mark.full
VOCAB, PAGE = 250, 8
GREEDY = SamplingParams(temperature=0.0)
LATENTS = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}


def make_model(kind: str, folder: Path, seed: int, **settings: Any) -> Path:
    """A model of latents, or one of the tiny ones with eight query heads."""
    if kind != "latents":
        sizes = {"num_attention_heads": 8, "moe_intermediate_size": 44, "vocab_size": 517}
        return make_tiny(kind, folder, seed, tokenizer=True, **{**sizes, **settings})
    family, fields = MOE_FAMILIES["deepseek-v3"]
    experts = {"n_routed_experts": 12, "moe_intermediate_size": 40}
    make_reference(family, folder, seed, **{**fields, **LATENTS, **experts, **settings})
    return folder


def make_llm(folder: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE, "prefill_chunk_tokens": 24, "max_step_tokens": 44, "num_pages": 48}
    sizes |= {"max_running_requests": 8, "rank_timeout_s": 60.0, "poison_free_pages": True}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, **{"dtype": "float32"} | sizes | drafts | settings)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Prompts that begin alike."""
    shared = [random.randrange(3, VOCAB) for _ in range(30)]
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


def check_texts(
    folder: Path, tp: int, dcp: int, lengths: tuple[int, ...], num_tokens: int, **settings: Any
) -> None:
    """With prompts in chunks of other lengths than pages, prefix hits and drafts that repeat."""
    prompts = random_prompts(lengths)
    choices = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, seed=random.randrange(1 << 60)),
        replace(GREEDY, logit_bias=dict.fromkeys((7, 8, 9), 50.0)),
        replace(GREEDY, constraint=Constraint(kind="regex", text="[ab]{3,9}c")),
    )
    count = 4 if (folder / "tokenizer.json").exists() else 3
    kinds = [choices[n % count] for n in range(len(prompts))]
    stop = StopCriteria(max_tokens=num_tokens, ignore_eos=True)

    def texts(**ranks: Any) -> tuple[list[list[int]], dict[str, int], list[str]]:
        with make_llm(folder, **settings, **ranks) as llm:
            found = llm.generate(prompts, kinds, stop) + llm.generate(prompts, kinds, stop)
            notices = [text for text in llm.engine.info.notices if "divide" in text]
            return [one.token_ids for one in found], llm.engine.counters(), notices

    alone, _, _ = texts()
    together, counters, (notice,) = texts(tp=tp, dcp=dcp, check_ranks=True)
    assert f"whose pages {dcp} ranks divide" in notice
    assert counters["prefix_hit_tokens"] > 0
    assert counters["drafted_tokens"] > 0
    load = partial(load_reference, folder)
    for prompt, params, found, expected in zip(
        prompts * 2, kinds * 2, together, alone, strict=True
    ):
        check_same(load, prompt, found, expected, params)


@pytest.mark.parametrize(
    ("kind", "tp", "dcp", "kv_heads"),
    [
        ("latents", 2, 2, 8),
        *(
            pytest.param(*case, marks=FULL)
            for case in [
                ("latents", 4, 4, 8),
                ("latents", 4, 2, 8),
                ("llama", 2, 2, 1),
                ("qwen3", 4, 2, 2),
                ("qwen3_moe", 4, 4, 1),
            ]
        ),
    ],
)
def test_texts_are_those_of_one_process(
    kind: str, tp: int, dcp: int, kv_heads: int, tmp_path: Path, seed: int
) -> None:
    folder = make_model(kind, tmp_path / "model", seed, num_key_value_heads=kv_heads)
    is_small = (kind, tp) == ("latents", 2)
    lengths = (50, 9, 33) if is_small else (5, 90, 41, 77, 12, 63, 100, 33, 54)
    check_texts(folder, tp, dcp, lengths, 12 if is_small else 40)


@FULL
@pytest.mark.parametrize("form", ["fp8 weights", "int8 weights", "fp8_e4m3", "int8", "stages"])
def test_texts_of_other_formats_and_stages(form: str, tmp_path: Path, seed: int) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128}
    folder = make_model("llama", tmp_path / "model", seed, num_key_value_heads=1, **sizes)
    settings: dict[str, Any] = {}
    if form == "fp8 weights":
        folder = fp8_copy(folder, tmp_path / "fp8", "blocks")[0]
    elif form == "int8 weights":
        settings["quantization"] = "int8"
    elif form == "stages":
        settings["pp"] = 2
    else:
        settings["kv_dtype"] = form
    prompts = random_prompts((50, 9, 33))
    stop = StopCriteria(max_tokens=20, ignore_eos=True)
    with make_llm(folder, **settings) as llm:
        alone = [one.token_ids for one in llm.generate(prompts, GREEDY, stop)]
    with make_llm(folder, tp=2, dcp=2, **settings) as llm:
        assert [one.token_ids for one in llm.generate(prompts, GREEDY, stop)] == alone


@FULL
@pytest.mark.parametrize("kept", ["fp8_e4m3", "int8"])
def test_texts_of_latents_in_8_bits(kept: str, tmp_path: Path, seed: int) -> None:
    folder = make_model("latents", tmp_path / "model", seed)
    prompts = random_prompts((50, 9, 33))
    stop = StopCriteria(max_tokens=20, ignore_eos=True)
    with make_llm(folder, kv_dtype=kept) as llm:
        alone = [one.token_ids for one in llm.generate(prompts, GREEDY, stop)]
    with make_llm(folder, tp=2, dcp=2, kv_dtype=kept) as llm:
        assert [one.token_ids for one in llm.generate(prompts, GREEDY, stop)] == alone


@FULL
def test_texts_with_adapters(tmp_path: Path, seed: int) -> None:
    folder = make_model("llama", tmp_path / "model", seed, num_key_value_heads=1)
    models = PeftModels(folder, tmp_path)
    models.add(seed, r=8, target_modules=["q_proj", "v_proj", "down_proj"])
    names = ("q", "k", "v", "o", "gate", "up", "down")
    stop = StopCriteria(max_tokens=6, ignore_eos=True)
    prompts = random_prompts((50, 9))
    lora = {"enable_lora": True, "max_loras": 2, "lora_projections": names}
    with make_llm(folder, tp=2, dcp=2, **lora) as llm:
        llm.load_adapter(next(iter(models.directories.values())))
        digests = list(models.digests) * len(prompts)
        found = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=digests)
    for prompt, digest, sample in zip(prompts, digests, found, strict=True):
        models.check(digest, prompt, sample)


@FULL
def test_ranks_that_are_late_at_every_step_change_nothing(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("qwen3", tmp_path / "model", seed, num_key_value_heads=1)
    monkeypatch.setattr(start, "MODULE", "weft.testing.engine.odd_rank")
    monkeypatch.setenv("ODD_RANK", "late")
    check_texts(folder, 4, 4, (50, 9, 33, 41), 12)


def generate_on_and_on(llm: LLM) -> None:
    while True:
        llm.generate(random_prompts((50, 20)), stop=StopCriteria(max_tokens=60))


@FULL
def test_a_lost_rank_ends_the_engine(tmp_path: Path, seed: int) -> None:
    folder = make_model("latents", tmp_path / "model", seed)
    before = psutil.Process().children()
    with make_llm(folder, tp=2, dcp=2) as llm:
        (rank,) = [one for one in psutil.Process().children() if one not in before]
        llm.generate(random_prompts((20,)), GREEDY, StopCriteria(max_tokens=3))
        rank.kill()
        with pytest.raises(RanksLost, match=r"rank 1.*signal 9"):
            generate_on_and_on(llm)


PLAIN, DIVIDED = {"tp": 1}, {"tp": 2, "dcp": 2}


@FULL
@pytest.mark.parametrize(
    ("owner", "filler"),
    [pair for pair in itertools.product((PLAIN, DIVIDED, {"tp": 2}), repeat=2) if DIVIDED in pair],
)
def test_shipped_pages(
    owner: dict[str, int], filler: dict[str, int], tmp_path: Path, seed: int
) -> None:
    """Between workers whose ranks divide pages and others."""
    folder = make_model("latents", tmp_path / "model", seed)
    clock, one = ManualClock(), {"num_threads": 1}
    pair = EnginePair(
        make_engine(folder, "decode", clock, **owner, **one),
        [make_engine(folder, "prefill", clock, worker_id="p0", **filler, **one)],
        clock,
    )
    try:
        for _ in range(3):
            pair.check_shipped(*random_prompts((6 * PAGE + 3,)), 6)
        pair.settle()
    finally:
        pair.close()


@FULL
def test_pages_come_back_from_host_memory_and_disk(tmp_path: Path, seed: int) -> None:
    folder = make_model("qwen3", tmp_path / "model", seed, num_key_value_heads=1)
    small = {"num_pages": 40, "host_cache_bytes": 1 << 18, "load_back_threshold": 0}
    more = {"disk_cache_dir": tmp_path, "prefill_chunk_tokens": 4 * PAGE, "num_threads": 1}
    bench = TierBench(folder, 20 * PAGE, **small, **more, **DIVIDED)
    try:
        bench.check_return(*random_prompts((19 * PAGE + 3,)))
    finally:
        bench.pair.close()


def test_what_is_not_divided_is_refused_with_the_reason(tmp_path: Path) -> None:
    one = make_model("llama", tmp_path / "one", 0, num_key_value_heads=1)
    two = make_model("llama", tmp_path / "two", 0, num_key_value_heads=2)
    windows = make_model(
        "mistral", tmp_path / "windows", 0, num_key_value_heads=1, sliding_window=20
    )
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (one, {"dcp": 2}, "a divisor of tp = 1"),
        (one, {"tp": 4, "dcp": 3}, "a divisor of tp = 4"),
        (two, {"tp": 2, "dcp": 2}, "2 KV heads are each on 1 rank, so dcp can be 1$"),
        (two, {"tp": 8, "dcp": 8}, "2 KV heads are each on 4 ranks, so dcp can be 1, 2, 4$"),
        (windows, {"tp": 2, "dcp": 2}, "sliding windows"),
        (one, {"tp": 2, "dcp": 2, "deterministic": True}, "1 with deterministic"),
        (one, {"tp": 2, "dcp": 2, "rendezvous": "h:1"} | {"pp": 2, "hosts": 2}, "1 with hosts = 2"),
        (one, {"tp": 2, "dcp": 2, "drafter": "eagle3", "draft_dir": two}, "1 with draft heads"),
    ]
    for folder, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            check_combination(EngineConfig(model_dir=folder, **settings))
    check_combination(EngineConfig(model_dir=two, tp=4, dcp=2))
    check_combination(EngineConfig(model_dir=one, tp=2, dcp=2, device="cuda"))


def test_pools_of_gpus_hold_all_pages_between_them() -> None:
    for size in (1, 2, 4, 8):
        here = random.randint(4, 1000)
        of_all = num_pages_of_all(here, size)
        # As many times more as there are ranks, but for the null pages.
        assert of_all == (here if size == 1 else size * here - size)
        assert num_pages_here(of_all, size) == here
        asked = random.randint(4, 1000)
        room = num_pages_here(asked, size)
        assert room - asked // size <= 2 or size == 1
        ranks: Any = SimpleNamespace(size=size, has_one_pool=size == 1)
        assert int(number_here(torch.arange(asked), ranks).max()) < room
