"""EAGLE heads of models with latent attention: a plane of their own in the target's pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.rounding_caches import check_samples
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle

pytestmark = pytest.mark.usefixtures("single_thread")

FIELDS = {**MOE_FAMILIES["deepseek-v3"][1], "num_hidden_layers": 3, "first_k_dense_replace": 3}
HEAD = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MAKE: dict[str, Callable[..., Path]] = {"eagle3": make_tiny_draft, "eagle": make_tiny_eagle}
STOP = StopCriteria(max_tokens=12, ignore_eos=True)


def make(folder: Path, seed: int, kind: str) -> tuple[Any, dict[str, Any]]:
    model = make_reference("deepseek_v3", folder / "m", seed, **FIELDS)
    draft = MAKE[kind](folder / "head", folder / "m", seed + 1, **HEAD)
    # What the gate measures on a busy machine may be no reason for drafts.
    return model, {"drafter": kind, "draft_dir": draft, "draft_gate": "fixed"}


def random_prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(3, 250) for _ in range(length)] for length in lengths]


def check(model: Any, prompt: list[int], tokens: list[int]) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    check_choices(logits, tokens)


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("eagle", marks=pytest.mark.full)])
def test_texts_are_the_targets(kind: str, tmp_path: Path, seed: int) -> None:
    """In chunks, and behind pages that are in the prefix cache."""
    model, settings = make(tmp_path, seed, kind)
    prompts = random_prompts(5, 70, 33)
    params, sizes = SamplingParams(temperature=0.0), {"page_size": 8, "num_pages": 120}
    sizes |= {"prefill_chunk_tokens": 24}
    with LLM(tmp_path / "m", dtype="float32", poison_free_pages=True, **sizes, **settings) as llm:
        for _ in range(2):
            for prompt, one in zip(prompts, llm.generate(prompts, params, STOP), strict=True):
                check(model, prompt, one.token_ids)
        counters = llm.engine.counters()
        assert counters["prefix_hit_tokens"] > 0
        assert counters["drafted_tokens"] > 0


@pytest.mark.full
@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3"])
def test_kv_in_8_bits(kept: str, tmp_path: Path, seed: int) -> None:
    _, settings = make(tmp_path, seed, "eagle3")
    prompts = random_prompts(5, 70)
    with LLM(tmp_path / "m", dtype="float32", kv_dtype=kept, num_pages=100, **settings) as llm:
        samples = llm.generate(prompts, stop=STOP, top_logprobs=4)
    check_samples(tmp_path / "m", prompts, samples, kept)


@pytest.mark.full
def test_shipped_pages(tmp_path: Path, seed: int) -> None:
    model, settings = make(tmp_path, seed, "eagle3")
    clock = ManualClock()
    roles = ("decode", "prefill")
    owner, filler = (make_engine(tmp_path / "m", role, clock, **settings) for role in roles)
    pair = EnginePair(owner, [filler], clock)
    prompts = random_prompts(90, 131)
    ids = [pair.submit(prompt, 10) for prompt in prompts]
    for prompt, tokens in zip(prompts, pair.finish(*ids), strict=True):
        check(model, prompt, tokens)
    for one in ids:
        (fill,) = pair.answers[one].finished[0].timeline.fills
        assert (fill.accepted_tokens > 0, fill.failure) == (True, "")
    pair.settle()
    pair.close()


def test_what_such_heads_do_not_go_with_is_refused(tmp_path: Path) -> None:
    _, settings = make(tmp_path, 0, "eagle3")
    for name, value in (("tp", 2), ("draft_width", 3)):
        with pytest.raises(ConfigError, match=f"{name} = {value}: must be 1 with a draft head"):
            LLM(tmp_path / "m", **{"num_pages": 50, name: value}, **settings)
