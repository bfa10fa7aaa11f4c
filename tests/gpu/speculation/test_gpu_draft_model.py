"""A separate draft model on a GPU: the text is the target's, the drafts are its own, inside
graphs and without; its memory is in the plan."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.features.speculative.model_drafter import ModelDrafter
from weft.engine.loop.llm import LLM
from weft.testing.engine.drafters import RandomGate
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PAGE = 16
VOCAB = 517
STOP = StopCriteria(max_tokens=24, ignore_eos=True)


def make_llm(path: Path, **settings: Any) -> LLM:
    given = {"device": "cuda", "dtype": "float32", "page_size": PAGE, "num_pages": 300}
    given |= {"max_running_requests": 16, "max_step_tokens": 128, "prefill_chunk_tokens": 32}
    return LLM(path, **given | settings)


def make_models(folder: Path) -> tuple[Path, Path, list[list[int]]]:
    """A target, a draft model and prompts."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    random.seed(seed)
    sizes = {"head_dim": 64, "vocab_size": VOCAB}
    target = make_tiny("llama", folder / "t", seed, **sizes)
    draft = make_tiny("qwen3", folder / "d", seed + 1, num_hidden_layers=1, **sizes)
    lengths = [random.randint(1, 5 * PAGE) for _ in range(6)]
    return target, draft, [[random.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_the_text_is_the_same(cuda_graphs: bool, tmp_path: Path) -> None:
    target, draft, prompts = make_models(tmp_path)
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, n=2, seed=5)):
        with make_llm(target, cuda_graphs=cuda_graphs) as plain:
            expected = plain.generate_all(prompts, params, STOP)
        for folder in (target, draft):
            settings = {"cuda_graphs": cuda_graphs, "poison_free_pages": True}
            with make_llm(target, drafter="model", draft_dir=folder, **settings) as drafting:
                engine = drafting.engine
                drafter = engine.drafter
                assert isinstance(drafter, ModelDrafter)
                gate = RandomGate((0, 1, 2, 3, 5))
                engine.scheduler.running_plans.gate = gate
                for _ in range(2):  # The second time on a warm cache.
                    groups = drafting.generate_all(prompts, params, STOP)
                    for group, wanted in zip(groups, expected, strict=True):
                        assert [s.token_ids for s in group] == [s.token_ids for s in wanted]
                counters = engine.counters()
                assert counters["drafted_tokens"] > 100
                if folder == target and not params.temperature:
                    # Rounding may decide between tokens that are equally likely.
                    assert counters["accepted_tokens"] > 0.95 * counters["drafted_tokens"]
                for memory in (engine.memory, drafter.memory):
                    memory.check_integrity()
                    assert memory.counts().used == 0


@pytest.mark.whole_device
def test_both_pools_are_sized_by_what_is_free(tmp_path: Path) -> None:
    target, draft, prompts = make_models(tmp_path)
    with make_llm(target) as plain:
        expected = plain.generate(prompts, stop=STOP)
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    with make_llm(target, num_pages=None, drafter="model", draft_dir=draft) as drafting:
        info, drafter = drafting.engine.info, drafting.engine.drafter
        assert isinstance(drafter, ModelDrafter)
        pools = info.num_pages * info.page_bytes + drafter._executor.pool.nbytes
        assert 0.9 * free < pools < free
        assert any("KV of the draft model" in notice for notice in info.notices)
        samples = drafting.generate(prompts, stop=STOP)
        assert [s.token_ids for s in samples] == [s.token_ids for s in expected]
        assert torch.cuda.mem_get_info()[0] > 128 << 20
