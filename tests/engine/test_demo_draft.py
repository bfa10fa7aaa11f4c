"""The demo model's draft head in the repository: small, readable, and of use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer
from weft.engine.end_tokens import end_token_ids
from weft.engine.llm import LLM
from weft.engine.models.demo import resolve_model
from weft.engine.request import StopCriteria

ROOT = Path(__file__).resolve().parents[2]
DRAFT = ROOT / "drafts" / "smollm2-135m-eagle3"
HELD_OUT = ROOT / "scripts" / "draft_training" / "held_out.json"


def test_it_is_small_and_names_no_place_of_its_maker() -> None:
    assert sum(path.stat().st_size for path in DRAFT.iterdir()) < 12 << 20
    with safe_open(DRAFT / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for name in ("config.json", "README.md"):
        assert not re.search(r"/(?:tmp|root|home|work)/", (DRAFT / name).read_text())


def test_it_can_name_what_ends_a_text() -> None:
    tensors = load_file(DRAFT / "model.safetensors")
    named = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert torch.equal(tensors["t2d"].nonzero().flatten(), named)
    model = resolve_model("demo")
    config, generation = (
        json.loads((model / name).read_text()) for name in ("config.json", "generation_config.json")
    )
    ends = end_token_ids(config, generation)
    assert ends
    assert set(ends) <= set(named.tolist())
    assert config["vocab_size"] == len(tensors["t2d"])


@pytest.mark.full
def test_drafts_are_right_on_prompts_it_was_not_trained_on() -> None:
    model = resolve_model("demo")
    tokenizer = AutoTokenizer.from_pretrained(model)
    chosen = json.loads(HELD_OUT.read_text())[::8]
    assert {prompt["kind"] for prompt in chosen} == {"chat", "summary", "code"}
    prompts = [
        tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_dict=False
        )
        for prompt in chosen
    ]
    with LLM(
        model, kv_memory_bytes=1 << 28, drafter="eagle3", draft_dir=DRAFT, max_draft_tokens=3
    ) as llm:
        for prompt in prompts:  # One at a time, where drafts pay most.
            llm.generate([prompt], stop=StopCriteria(max_tokens=128))
        counters = llm.engine.counters()
    assert counters["verified_runs"] > 100
    assert counters["accepted_tokens"] / counters["verified_runs"] > 0.6
