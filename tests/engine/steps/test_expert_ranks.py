"""Ranks that hold whole experts make the text that one rank makes."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import ConfigError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, packed_models
from weft.testing.models.moe_families import MOE_FAMILIES
from weft.testing.models.mxfp4_models import as_mxfp4
from weft.testing.models.quantised_models import quantised_copy
from weft.testing.models.reference_models import make_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 251
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
EXPERTS: dict[str, tuple[str, int]] = {
    "deepseek-v3": ("n_routed_experts", 12),
    "gpt-oss": ("num_local_experts", 8),
    "qwen2-moe": ("num_experts", 8),
    "llama4": ("num_local_experts", 4),
    "qwen3_moe": ("num_experts", 12),
    "nemotron_h-experts": ("n_routed_experts", 12),
}
"""The field that counts experts, and a number that divides among 2 and 4 ranks."""


def make_model(name: str, folder: Path, seed: int) -> Path:
    experts = dict([EXPERTS[name]])
    if name == "qwen3_moe":
        # Columns of an expert that do not divide among ranks.
        fields = {"vocab_size": VOCAB, "moe_intermediate_size": 43, **HEADS, **experts}
        return make_tiny(name, folder, seed, tokenizer=True, **fields)
    if name in FAMILIES:
        return make_family(name, folder, seed, **experts)
    kind, fields = MOE_FAMILIES[name]
    heads = HEADS | ({"num_key_value_heads": 8} if kind == "deepseek_v3" else {})
    make_reference(kind, folder, seed, **{**fields, **heads, **experts})
    return folder


def random_prompts() -> list[list[int]]:
    return [[random.randrange(3, 250) for _ in range(length)] for length in (5, 90, 33)]


def texts(
    folder: Path, prompts: list[list[int]], **settings: Any
) -> tuple[list[list[int]], list[str]]:
    """Greedy tokens of a long prompt in chunks, of ones beside each other and of one alone."""
    stop = StopCriteria(max_tokens=16, ignore_eos=True)
    sizes = {"num_pages": 96, "page_size": 8, "prefill_chunk_tokens": 48, "max_step_tokens": 64}
    with LLM(folder, **{"dtype": "float32"} | sizes | settings) as llm:
        greedy = SamplingParams(temperature=0.0)
        found = llm.generate(prompts, greedy, stop) + llm.generate(prompts[:1], greedy, stop)
        return [sample.token_ids for sample in found], llm.engine.info.notices


CASES = [
    ("qwen3_moe", 2),
    *(
        pytest.param(name, size, marks=pytest.mark.full)
        for name in EXPERTS
        for size in (2, 4)
        if (name, size) not in {("qwen3_moe", 2), ("nemotron_h-experts", 4)}
    ),
]


@pytest.mark.parametrize(("name", "size"), CASES)
def test_texts_are_those_of_one_rank(name: str, size: int, tmp_path: Path, seed: int) -> None:
    folder, prompts = make_model(name, tmp_path / "model", seed), random_prompts()
    alone, _ = texts(folder, prompts)
    together, notices = texts(folder, prompts, tp=size, ep=size)
    (notice,) = (text for text in notices if "tensor parallel" in text)
    _, count = EXPERTS[name]
    assert f"{count // size} of {count} experts" in notice
    for prompt, found, expected in zip([*prompts, prompts[0]], together, alone, strict=True):
        check_same(partial(load_reference, folder), prompt, found, expected)


FORMATS: dict[str, Callable[[Path, Path], Path]] = {
    "fp8 blocks": lambda source, path: fp8_copy(source, path, "blocks")[0],
    "fp8 channels": lambda source, path: fp8_copy(source, path, "channel")[0],
    "int8": quantised_copy,
    "int4": lambda source, path: packed_models(source, path, LAYOUTS["compressed-tensors"])[0],
}


@pytest.mark.full
@pytest.mark.parametrize("quantization", [*FORMATS, "load int8", "load int4"])
def test_texts_of_quantised_experts_are_those_of_one_rank(
    quantization: str, tmp_path: Path, seed: int
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4, "head_dim": 128}
    sizes |= {"intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    folder = make_tiny("qwen3_moe", tmp_path / "model", seed, tokenizer=True, **sizes)
    settings: dict[str, Any] = {}
    if quantization in FORMATS:
        folder = FORMATS[quantization](folder, tmp_path / "quantised")
    else:
        settings = {"quantization": quantization.removeprefix("load ")}
    prompts = random_prompts()
    alone, _ = texts(folder, prompts, **settings)
    assert texts(folder, prompts, tp=2, ep=2, **settings)[0] == alone


@pytest.mark.full
def test_texts_of_experts_in_mxfp4_are_those_of_one_rank(tmp_path: Path, seed: int) -> None:
    _, fields = MOE_FAMILIES["gpt-oss"]
    sizes = {"intermediate_size": 96, "hidden_size": 96, "num_local_experts": 4}
    make_reference("gpt_oss", tmp_path, seed, **{**fields, **sizes})
    as_mxfp4(tmp_path)
    prompts = random_prompts()
    assert texts(tmp_path, prompts, tp=2, ep=2)[0] == texts(tmp_path, prompts)[0]


def test_what_cannot_be_divided_is_refused_with_the_way_out(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 8, "num_experts": 6, "moe_intermediate_size": 44}
    folder = make_tiny("qwen3_moe", tmp_path / "model", 0, **fields)
    with pytest.raises(ConfigError, match=r"6 experts .* tp = 1, 2, or with ep = 1 and tp = 4"):
        LLM(folder, tp=4, ep=4)
    with pytest.raises(ConfigError, match="must be 1 or tp = 4"):
        LLM(folder, tp=4, ep=2)
    with pytest.raises(ConfigError, match="must be 1 or tp = 1"):
        LLM(folder, ep=2)
    fields |= {"num_experts": 8, "moe_intermediate_size": 43}
    folder = make_tiny("qwen3_moe", tmp_path / "odd", 0, **fields)
    with pytest.raises(ConfigError, match=r"43 columns .* tp = 1, or with ep = tp = 2, 4"):
        LLM(folder, tp=2)
    with pytest.raises(ConfigError, match="has no experts"):
        LLM(make_tiny("llama", tmp_path / "llama", 0, num_attention_heads=8), tp=2, ep=2)
