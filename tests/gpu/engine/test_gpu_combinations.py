"""Latents in 8 bits, EAGLE heads beside latents, and adapters of layers that differ, on a GPU: the
answers of the same engine on a CPU.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.every_family import write_model
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_adapters import peft_model
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle

pytestmark = pytest.mark.needs("cuda")

FIELDS = {**MOE_FAMILIES["deepseek-v3"][1], "num_hidden_layers": 3, "first_k_dense_replace": 3}
HEAD = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
STOP = StopCriteria(max_tokens=16, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0)


def random_prompts() -> list[list[int]]:
    return [[random.randrange(3, 250) for _ in range(length)] for length in (5, 90, 33, 150)]


def check(one: list[GeneratedSample], other: list[GeneratedSample], most: float) -> None:
    """Log-probabilities up to the first token that differs, which float32's noise may choose."""
    for mine, right in zip(one, other, strict=True):
        for found, expected in zip(mine.logprobs, right.logprobs, strict=True):
            assert found.logprob == pytest.approx(expected.logprob, abs=most)
            if found.token_id != expected.token_id:
                break


def run(
    path: Path, device: str, prompts: list[list[int]], **settings: Any
) -> list[GeneratedSample]:
    sizes = {"num_pages": 160, "prefill_chunk_tokens": 64, "max_running_requests": 8}
    adapter = settings.pop("adapter", None)
    with LLM(path, device=device, dtype="float32", **sizes, **settings) as llm:
        names = [llm.load_adapter(adapter)] * len(prompts) if adapter else []
        return llm.generate(prompts, GREEDY, STOP, top_logprobs=2, adapters=names)


@pytest.mark.parametrize("kept", ["int8", "fp8_e4m3"])
def test_latents_in_8_bits(kept: str, tmp_path: Path, seed: int) -> None:
    make_reference("deepseek_v3", tmp_path / "m", seed, **FIELDS)
    prompts = random_prompts()
    both = [run(tmp_path / "m", d, prompts, kv_dtype=kept) for d in ("cuda", "cpu")]
    check(*both, most=0.1)


@pytest.mark.parametrize("make", [make_tiny_draft, make_tiny_eagle])
def test_heads_beside_latents(make: Callable[..., Path], tmp_path: Path, seed: int) -> None:
    make_reference("deepseek_v3", tmp_path / "m", seed, **FIELDS)
    head = make(tmp_path / "head", tmp_path / "m", seed + 1, **HEAD)
    kind = "eagle3" if make is make_tiny_draft else "eagle"
    prompts = random_prompts()
    found = run(tmp_path / "m", "cuda", prompts, drafter=kind, draft_dir=head)
    check(found, run(tmp_path / "m", "cpu", prompts), most=1e-2)


@pytest.mark.parametrize("name", ["gemma4", "nemotron_h", "laguna", "mimo"])
def test_adapters_of_layers_that_differ(name: str, tmp_path: Path, seed: int) -> None:
    write_model(name, tmp_path / "m", seed)
    pattern = r".*(self_attn|mixer)\.([qkvo]|in)_proj"
    model = peft_model(tmp_path / "m", seed, r=5, target_modules=pattern)
    model.save_pretrained(tmp_path / "adapter")
    settings = {"enable_lora": True, "adapter": tmp_path / "adapter"}
    prompts = random_prompts()
    both = [run(tmp_path / "m", d, prompts, **settings) for d in ("cuda", "cpu")]
    check(*both, most=1e-2)
