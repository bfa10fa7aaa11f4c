"""States of recurrent layers on a GPU beyond its pool: tiers, prefill workers, adapters, ranks.

Texts are those of an engine on a CPU that computes everything.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.engine.ranked_texts import make_llm, ranked, texts_of
from weft.testing.engine.tier_bench import NUM_NEW, TierBench
from weft.testing.models.families import make_family
from weft.testing.models.lora_reference import BASE, PeftModels, unload_all

pytestmark = pytest.mark.needs("cuda")

DEVICE, PAGE, VOCAB = "cuda", 8, 259
LENGTH = 12 * PAGE + 3
FAMILIES = ["qwen3_next", "nemotron_h"]


def prompt_of(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def alone(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(path, dtype="float32", page_size=PAGE, num_pages=200, prefix_cache=False) as llm:
        return [sample.token_ids for sample in llm.generate(prompts, stop=stop)]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_the_pool_gave_up_comes_back(name: str, tmp_path: Path) -> None:
    """From host memory, which has room for one prompt, and from disk; whole, and a part."""
    path = make_family(name, tmp_path / "model", random.randrange(10**6))
    whole = prompt_of(LENGTH)
    prompts = [whole, [*whole[: 7 * PAGE], *prompt_of(9)]]
    expected = alone(path, prompts)
    for tiers in (
        {"host_cache_bytes": 16 << 20},
        {"disk_cache_dir": tmp_path / "disk", "disk_cache_bytes": 64 << 20},
    ):
        bench = TierBench(
            path,
            LENGTH,
            device=DEVICE,
            num_pages=40,
            load_back_threshold=0,
            prefill_chunk_tokens=4 * PAGE,
            max_running_requests=2,
            checkpoint_tokens=5 * PAGE,
            **tiers,
        )
        try:
            assert bench.ask(whole) == expected[0]
            for prompt, answer in zip(prompts, expected, strict=True):
                for _ in range(4):
                    bench.ask(prompt_of(LENGTH))
                bench.settle()
                assert bench.ask(prompt) == answer
                assert sum(fill.accepted_tokens for fill in bench.fills()) > 0
            bench.settle()
        finally:
            bench.pair.close()


def test_prefill_workers_ship_states(tmp_path: Path) -> None:
    path = make_family("qwen3_next", tmp_path / "model", random.randrange(10**6))
    prompt = prompt_of(6 * PAGE + 3)
    (expected,) = alone(path, [prompt])
    clock = ManualClock()
    pair = EnginePair(
        make_engine(path, "decode", clock, device=DEVICE),
        [make_engine(path, "prefill", clock, device=DEVICE, worker_id="p0")],
        clock,
    )
    try:
        request_id = pair.submit(prompt, NUM_NEW)
        assert pair.finish(request_id) == [expected]
        (fill,) = pair.answers[request_id].finished[0].timeline.fills
        assert (fill.accepted_tokens, fill.failure) == (6 * PAGE, "")
        pair.settle()
    finally:
        pair.close()


ADAPTED: list[tuple[str, list[str]]] = [
    ("qwen3_5", ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]),
    ("bamba", ["in_proj", "out_proj"]),
]


@pytest.mark.parametrize(("name", "recurrent"), ADAPTED)
def test_texts_of_adapters_are_pefts(name: str, recurrent: list[str], tmp_path: Path) -> None:
    heads: dict[str, int] = {}
    if name == "bamba":
        # Heads of 16 elements; before 5.24 transformers has one norm over all groups.
        heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "mamba_n_groups": 1}
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    models = PeftModels(make_family(name, tmp_path / "model", seed, **heads), tmp_path)
    usual = ["q_proj", "o_proj", "down_proj"]
    targets = ([*usual, *recurrent], recurrent, usual)
    adapters = [
        models.add(seed + index, r=5, target_modules=some) for index, some in enumerate(targets)
    ]
    settings: dict[str, Any] = {"page_size": PAGE, "num_pages": 200, "checkpoint_tokens": 2 * PAGE}
    settings |= {"dtype": "float32", "max_running_requests": 4, "enable_lora": True}
    with LLM(models.model_dir, device=DEVICE, poison_free_pages=True, **settings) as llm:
        assert [llm.load_adapter(path) for path in models.directories.values()] == adapters
        prompt, asked = prompt_of(45), [*adapters, BASE]
        stop = StopCriteria(max_tokens=2 * PAGE + 3, ignore_eos=True)
        for _ in range(2):
            samples = llm.generate([prompt] * 4, stop=stop, top_logprobs=20, adapters=asked)
            for adapter, sample in zip(asked, samples, strict=True):
                models.check(adapter, prompt, sample)
        assert llm.engine.counters()["prefix_hit_tokens"] > 0
        unload_all(llm.engine)


def test_texts_of_ranks_are_those_of_one(tmp_path: Path) -> None:
    path = make_family("qwen3_next", tmp_path / "model", random.randrange(10**6))
    prompts = [prompt_of(length) for length in (1, 45, 90)]
    settings: dict[str, Any] = {"num_pages": 90, "checkpoint_tokens": 32}
    with make_llm(path, device=DEVICE, **settings) as llm:
        expected = texts_of(llm, prompts)
    found = ranked("texts", path, prompts, tp=2, **settings)
    assert found["counters"]["prefix_hit_tokens"] > 0
    for one, other in zip(expected, found["texts"], strict=True):
        assert other["tokens"] == one["tokens"]
