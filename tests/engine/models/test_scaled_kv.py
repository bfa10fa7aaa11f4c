"""Engines that keep K and V in 8 bits against transformers with caches that round alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.tier_bench import TierBench, prompt_of
from weft.testing.models.families import make_family
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.rounding_caches import check_samples, check_tokens
from weft.testing.models.tiny_adapters import peft_model
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

STOP = StopCriteria(max_tokens=16, ignore_eos=True)
WINDOWS = {"sliding_window": 40, "use_sliding_window": True, "max_window_layers": 1}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "chunks": ({"prefill_chunk_tokens": 32}, {}),
    "windows": ({"prefill_chunk_tokens": 32, "page_size": 8, "kv_dtype": "int8"}, WINDOWS),
    "ngram": ({"drafter": "ngram"}, {}),
    "trees": ({"drafter": "eagle3", "draft_width": 3}, {}),
    "deterministic": ({"deterministic": True, "prefill_chunk_tokens": 48}, {}),
    "ranks": ({"tp": 2}, {}),
}
"""Settings of the engine and fields of the model."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("windows", "trees") else pytest.mark.full)
        for name in SETTINGS
    ],
)
def test_tokens_are_those_of_rounding_caches(name: str, tmp_path: Path) -> None:
    settings, fields = SETTINGS[name]
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    path = make_tiny("qwen2", tmp_path / "model", seed, head_dim=32, **fields)
    if settings.get("drafter") == "eagle3":
        settings = {**settings, "draft_dir": make_tiny_draft(tmp_path / "head", path, seed + 1)}
    shared = [random.randrange(3, 500) for _ in range(70)]
    prompts = [shared[:cut] + [random.randrange(3, 500) for _ in range(9)] for cut in (0, 33, 70)]
    settings = {"dtype": "float32", "num_pages": 200, "poison_free_pages": True, **settings}
    kept = settings.setdefault("kv_dtype", "fp8_e4m3")
    with LLM(path, **settings) as llm:
        samples = llm.generate(prompts, stop=STOP, top_logprobs=4)
        answers = [sample.token_ids for sample in samples]
        assert [sample.token_ids for sample in llm.generate(prompts, stop=STOP)] == answers
        assert llm.engine.counters()["prefix_hit_tokens"] > 0
    check_samples(path, prompts, samples, kept)


WIDE = {"head_dim": 32}
QUICK = ("qwen3_next", "gemma4-keys", "youtu")
LATENTS = {"kv_lora_rank": 32, "qk_rope_head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "nemotron_h": {},
    "gemma2": {},
    "gemma3": {},
    "gemma4": {"per_layer_config": {"1": WIDE, "4": WIDE}},
    "gemma4-keys": {},
    "youtu": LATENTS,
    "ling3": LATENTS,
}
"""Recurrent layers, soft caps, windows with pages of their own, heads that differ, latents."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in FAMILIES],
)
def test_families(name: str, tmp_path: Path) -> None:
    """Chunks, and a prefix that is in pages already."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    path = make_family(name, tmp_path, seed, **FAMILIES[name])
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (90, 17)]
    settings = {"page_size": 8, "num_pages": 200, "prefill_chunk_tokens": 16}
    with LLM(path, dtype="float32", kv_dtype="fp8_e4m3", **settings) as llm:
        first = llm.generate(prompts, stop=STOP, top_logprobs=4)
        longer = [prompt + sample.token_ids for prompt, sample in zip(prompts, first, strict=True)]
        second = llm.generate(longer, stop=STOP, top_logprobs=4)
    check_samples(path, prompts + longer, first + second)


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"tp": 2}, {"drafter": "ngram"}])
@pytest.mark.parametrize("kept", ["fp8_e4m3", "int8"])
def test_latents(kept: str, settings: dict[str, Any], tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    kind, fields = MOE_FAMILIES["deepseek-v3"]
    own = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
    make_reference(kind, path := tmp_path, seed, **{**fields, **own, "first_k_dense_replace": 4})
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (90, 17)]
    with LLM(path, dtype="float32", kv_dtype=kept, num_pages=100, **settings) as llm:
        samples = llm.generate(prompts, stop=STOP, top_logprobs=4)
    check_samples(path, prompts, samples, kept)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2", "qwen3_next", "youtu"])
def test_shipped_pages(name: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    if name == "qwen2":
        path = make_tiny(name, tmp_path, seed, head_dim=32, **WINDOWS)
    else:
        path = make_family(name, tmp_path, seed, **(LATENTS if name == "youtu" else {}))
    clock = ManualClock()
    owner, filler = (
        make_engine(path, role, clock, kv_dtype="fp8_e4m3") for role in ("decode", "prefill")
    )
    pair = EnginePair(owner, [filler], clock)
    prompts = [[random.randrange(3, 250) for _ in range(length)] for length in (90, 131)]
    ids = [pair.submit(prompt, 10) for prompt in prompts]
    answers = pair.finish(*ids)
    for one in ids:
        (fill,) = pair.answers[one].finished[0].timeline.fills
        assert (fill.accepted_tokens > 0, fill.failure) == (True, "")
    pair.settle()
    pair.close()
    check_tokens(path, prompts, answers)


@pytest.mark.full
def test_pages_come_back_from_host_memory(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, random.randrange(10**6), head_dim=32)
    settings = {"num_pages": 64, "host_cache_bytes": 8 << 20, "load_back_threshold": 0}
    bench = TierBench(path, 163, kv_dtype="fp8_e4m3", prefill_chunk_tokens=32, **settings)
    prompt = prompt_of(163)
    answers = [bench.ask(prompt)]
    bench.push_out()
    answers.append(bench.ask(prompt))
    (fill,) = bench.fills()
    assert (fill.accepted_tokens > 100, fill.failure) == (True, "")
    bench.close()
    check_tokens(path, [prompt] * 2, answers)


@pytest.mark.full
def test_adapters(tmp_path: Path) -> None:
    """An adapter's tokens are those of the model into which it is merged."""
    path = make_tiny("llama", tmp_path / "model", seed := random.randrange(10**6), head_dim=32)
    print(f"seed {seed}")
    model = peft_model(path, seed + 1)
    model.save_pretrained(tmp_path / "adapter")
    prompts = [[random.randrange(3, 500) for _ in range(length)] for length in (9, 60)]
    with LLM(path, dtype="float32", kv_dtype="fp8_e4m3", enable_lora=True, num_pages=100) as llm:
        name = llm.load_adapter(tmp_path / "adapter")
        samples = llm.generate(prompts, stop=STOP, adapters=[name] * 2, top_logprobs=4)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    check_samples(tmp_path / "merged", prompts, samples)
