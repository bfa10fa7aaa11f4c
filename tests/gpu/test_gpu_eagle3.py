"""EAGLE-3 heads on a GPU: the text is the target's, the drafts are the head's, inside graphs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from drafters import KnownDrafter, texts_of
from eagle3_cases import WatchedHead, check_chains
from tiny_drafts import make_tiny_draft
from tiny_models import make_tiny
from weft.engine.llm import LLM
from weft.engine.request import SamplingParams, StopCriteria

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
STOP = StopCriteria(max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_drafts_are_the_heads_and_the_text_is_the_targets(
    kind: str, cuda_graphs: bool, tmp_path: Path
) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    target_dir = make_tiny(
        kind, tmp_path / "t", seed, num_hidden_layers=4, head_dim=64, vocab_size=VOCAB
    )
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, seed + 1)
    shared = [random.randrange(3, VOCAB) for _ in range(3 * PAGE + 3)]
    prompts = [
        shared[: random.randint(1, len(shared))]
        + [random.randrange(3, VOCAB) for _ in range(random.randint(1, 2 * PAGE))]
        for _ in range(6)
    ]
    params = SamplingParams(temperature=1.0, seed=5, n=2)
    settings = {
        "device": "cuda",
        "dtype": "float32",
        "page_size": PAGE,
        "num_pages": 300,
        "max_running_requests": 16,
        "max_step_tokens": 128,
        "prefill_chunk_tokens": 32,
        "poison_free_pages": True,
        "cuda_graphs": cuda_graphs,
    }
    with LLM(target_dir, **settings) as plain:
        expected = plain.generate_all(prompts, params, STOP)
    known = KnownDrafter(texts_of(prompts, expected, 5), VOCAB, 0.6)
    with LLM(target_dir, draft_dir=draft_dir, drafter="eagle3", **settings) as drafting:
        watched = WatchedHead(drafting.engine, known)
        for _ in range(2):  # The second time on a warm cache.
            groups = drafting.generate_all(prompts, params, STOP)
            for group, wanted in zip(groups, expected, strict=True):
                assert [s.token_ids for s in group] == [s.token_ids for s in wanted]
        assert drafting.engine.counters()["accepted_tokens"] > 0
    # Rounding may decide between tokens that the head finds equally likely.
    check_chains(watched, target_dir, draft_dir, allowed=1)


def test_a_pool_that_is_sized_by_what_is_free_has_room_for_the_heads_layer(tmp_path: Path) -> None:
    target_dir = make_tiny("llama", tmp_path / "t", 3, num_hidden_layers=4, head_dim=64)
    draft_dir = make_tiny_draft(tmp_path / "d", target_dir, 4)
    settings = {"device": "cuda", "dtype": "bfloat16", "max_running_requests": 8}
    prompt = [random.randrange(3, VOCAB) for _ in range(40)]
    greedy = SamplingParams(temperature=0.0)
    with LLM(target_dir, draft_dir=draft_dir, drafter="eagle3", **settings) as drafting:
        (sample,) = drafting.generate([prompt], greedy, STOP)
        assert len(sample.token_ids) == STOP.max_tokens
        assert torch.isfinite(drafting.engine.pipeline._runner.pool[1:4]).all()
