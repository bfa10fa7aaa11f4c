"""Models with recurrent layers on a GPU: the tokens that transformers computes, and the engine's
own on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ConfigError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.every_family import load_reference, missing_type
from weft.testing.models.families import HYBRIDS, HYBRIDS_WITH_IMAGES, make_family
from weft.testing.models.tiny_mtp import make_tiny_mtp

pytestmark = pytest.mark.needs("cuda")

PAGE, VOCAB, NUM_NEW = 8, 259, 40
SETTINGS: dict[str, dict[str, Any]] = {
    "whole": {},
    "cut": {"prefill_chunk_tokens": PAGE, "max_step_tokens": 17, "overlap": "on"},
    "drafts": {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 5},
    "eager": {"cuda_graphs": False, "drafter": "ngram", "max_draft_tokens": 3},
}
Record = Callable[[str, object], None]
NAMES = (*HYBRIDS_WITH_IMAGES, *(name for name in HYBRIDS if name != "jamba"))
WIDE = (
    *("qwen3_next", "qwen3_5", "qwen3_5-images", "qwen3_5_moe", "kimi_linear", "nemotron_h"),
    *("nemotron_h-experts", "ling3"),
)
VALUES: dict[str, Any] = {
    "page_size": PAGE,
    "poison_free_pages": True,
    "checkpoint_tokens": 6 * PAGE,
    "max_running_requests": 6,
    "dtype": "float32",
    "num_pages": 200,
}


def record_cell(path: Path, record: Record) -> None:
    """Has `scripts/family_table.py` tell of the test."""
    record("architecture", ModelConfig.load(path).architecture)
    record("column", "on a GPU")


def make_prompts() -> list[list[int]]:
    prompts = [[random.randrange(3, VOCAB) for _ in range(length)] for length in (1, PAGE, 45, 330)]
    prompts[2] = prompts[2][:9] * 5  # Some drafts are accepted.
    return prompts + [[*prompts[3][:cut], 7, 8, 9] for cut in (3 * PAGE, 101)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_tokens_are_transformers(
    name: str, setting: str, tmp_path: Path, record_property: Record
) -> None:
    """Twice, the second time from cached prefixes; some requests share a prefix."""
    if why := missing_type(name):
        pytest.skip(why)
    # Attention on a GPU takes heads of 16 elements or more.
    heads = {} if name in WIDE else {"num_attention_heads": 3, "num_key_value_heads": 1}
    if name == "bamba":
        # Before 5.24 transformers has one norm over all groups.
        heads["mamba_n_groups"] = 1
    path = make_family(name, tmp_path, seed := random.randrange(10**6), **heads)
    print(f"seed {seed}")
    record_cell(path, record_property)
    prompts, stop = make_prompts(), StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    with LLM(path, device="cuda", **VALUES, **SETTINGS[setting]) as llm:
        first, again = ([s.token_ids for s in llm.generate(prompts, stop=stop)] for _ in "12")
        assert llm.engine.counters()["prefix_hit_tokens"] >= 330 // PAGE * PAGE
    assert again == first
    assert_most_likely(path, prompts, first)


@torch.inference_mode()
def assert_most_likely(path: Path, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Each token is the one with the largest logit of a run over all of the text before it."""
    model = load_reference(path)
    for prompt, text in zip(prompts, texts, strict=True):
        logits = model(torch.tensor([prompt + text]), use_cache=False).logits[0]
        logits = logits[len(prompt) - 1 : -1]
        best = logits.max(dim=1).values
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert (best - chosen).max() <= 1e-4 * logits.abs().max()


def test_layers_of_the_first_mamba_are_refused(tmp_path: Path, record_property: Record) -> None:
    path = make_family("jamba", tmp_path, random.randrange(10**6))
    record_cell(path, record_property)
    reason = "layers of the first Mamba"
    with pytest.raises(ConfigError, match=reason):
        LLM(path, device="cuda", **VALUES)
    record_property("refused", reason)


@pytest.mark.parametrize("gate", ["fixed", "measured"])
@pytest.mark.parametrize("kind", ["qwen", "glm", "deepseek"])
def test_mtp_chains_change_no_token(kind: str, gate: str, tmp_path: Path) -> None:
    """Chains in graphs, verified by steps that begin where the device alone knows."""
    make_tiny_mtp(kind, path := tmp_path / "model", seed := random.randrange(10**6))
    print(f"seed {seed}")
    prompts, stop = make_prompts(), StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    found = {}
    for device, settings in (
        ("cpu", {}),
        ("cuda", {"drafter": "mtp", "draft_gate": gate, "max_draft_tokens": 3}),
    ):
        with LLM(path, device=device, **VALUES, **settings) as llm:
            found[device] = [[s.token_ids for s in llm.generate(prompts, stop=stop)] for _ in "12"]
            counters = llm.engine.counters()
    assert found["cuda"] == found["cpu"]
    if gate == "fixed":
        assert counters["drafted_tokens"] > 0
