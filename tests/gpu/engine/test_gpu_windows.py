"""Pages behind windows are freed on a GPU beside drafts, tiers and a KV store: texts are the greedy
ones that transformers computes.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.engine_storm import check_empty
from weft.testing.engine.store_pair import StorePair
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.every_family import greedy_tokens, load_reference
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
WINDOW = 2 * PAGE + 5
LENGTH = 16 * PAGE + 3
LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
FIELDS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "layer_types": LAYERS,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
}
SETTINGS: dict[str, Any] = {
    "device": "cuda:0",
    "page_size": PAGE,
    "prefill_chunk_tokens": 4 * PAGE,
    "max_step_tokens": 4 * PAGE,
    "max_running_requests": 4,
    "poison_free_pages": True,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    return make_tiny("qwen3", tmp_path_factory.mktemp("tiny"), seed=seed, **FIELDS)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return load_reference(model_dir)


@pytest.mark.parametrize("drafter", ["ngram", "eagle3"])
def test_drafts(drafter: str, model_dir: Path, reference: Any, tmp_path: Path) -> None:
    """The second time, prompts begin behind prefixes that are cached."""
    head = make_tiny_draft(tmp_path / "head", model_dir, 1) if drafter == "eagle3" else None
    shared = prompt_of(6 * PAGE + 3)
    prompts = [shared[:cut] + prompt_of(PAGE) for cut in (5 * PAGE, 6 * PAGE + 3)]
    prompts.append(prompt_of(9) * 10)
    expected = [greedy_tokens(reference, prompt, 3 * PAGE) for prompt in prompts]
    params, stop = (
        SamplingParams(temperature=0.0),
        StopCriteria(max_tokens=3 * PAGE, ignore_eos=True),
    )
    given = {"drafter": drafter, "draft_dir": head, "draft_gate": "fixed", "max_draft_tokens": 5}
    with LLM(model_dir, dtype="float32", num_pages=60, **SETTINGS, **given) as llm:
        for _ in "12":
            samples = llm.generate(prompts, params, stop)
            assert [sample.token_ids for sample in samples] == expected
        counters, (window,) = llm.engine.counters(), llm.engine.parts.companions
        assert counters["drafted_tokens"] > 0
        assert counters["prefix_hit_tokens"] > 0
        assert window.memory.num_usable_pages < 60
        assert not window._held
        for memory in llm.engine.memories:
            memory.check_integrity()


def ask_parts_of_a_prompt(bench: TierBench, reference: Any) -> None:
    """A prompt that comes back whole from below the pool, and beginnings of it."""
    prompt = prompt_of(LENGTH)
    for asked in (prompt, prompt, prompt[: random.randrange(WINDOW, LENGTH)] + prompt_of(5)):
        assert bench.ask(asked) == greedy_tokens(reference, asked, NUM_NEW)
        bench.push_out()


def is_whole(bench: TierBench) -> bool:
    """Whether nothing is held once all has ended."""
    bench.settle()
    check_empty(bench.engine)
    (window,) = bench.engine.parts.companions
    return not len(window) and window._reserved == (0, 0)


def test_host_memory(model_dir: Path, reference: Any) -> None:
    settings = {"host_cache_bytes": 64 << 20, "load_back_threshold": 0, "num_pages": 48}
    bench = TierBench(model_dir, LENGTH, window_pages="free", **SETTINGS, **settings)
    ask_parts_of_a_prompt(bench, reference)
    host = bench.counters("host")
    assert host["loaded_pages"] > 0
    assert host["corrupt_pages"] == host["failed_loads"] == host["failed_saves"] == 0
    assert is_whole(bench)
    bench.close()


def test_disk_after_a_restart(model_dir: Path, reference: Any, tmp_path: Path) -> None:
    prompt = prompt_of(LENGTH)
    expected = greedy_tokens(reference, prompt, NUM_NEW)
    settings = {"disk_cache_dir": tmp_path, "load_back_threshold": 0, "num_pages": 48}
    settings |= {"host_cache_bytes": 64 << 20}
    for is_second in (False, True):
        bench = TierBench(model_dir, LENGTH, window_pages="free", **SETTINGS, **settings)
        assert bench.ask(prompt) == expected
        assert bool(bench.fills()) == is_second
        assert is_whole(bench)
        bench.close()


@pytest.fixture
def pair(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorePair]:
    monkeypatch.setattr("weft.engine.sources.store.LOOKUP_TIMEOUT_S", 60.0)
    settings = {"has_store": True, "window_pages": "free", "num_pages": 120}
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, load_back_threshold=0, **SETTINGS, **settings)
    made = StorePair(owner, clock, WINDOW, NUM_NEW)
    yield made
    made.close()


def test_kv_store(pair: StorePair, reference: Any) -> None:
    stem, num_found = prompt_of(LENGTH), 0
    for cut in (LENGTH, *(random.randrange(WINDOW, LENGTH) for _ in range(3))):
        prompt = stem[:cut] + prompt_of(5)
        assert pair.ask(prompt) == greedy_tokens(reference, prompt, NUM_NEW)
        num_found += sum(fill.source == "kvstore" for fill in pair.fills())
        pair.forget()
    assert num_found == 3
    check_empty(pair.owner)
