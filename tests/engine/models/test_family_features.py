"""Adapters and drafts with families made of parts."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.contract.errors import ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.families import FAMILIES, HYBRIDS, HYBRIDS_WITH_IMAGES, make_family
from weft.testing.models.lora_reference import BASE, PeftModels
from weft.testing.models.tiny_drafts import make_tiny_draft

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE = 8
VOCAB = 259
STOP = StopCriteria(max_tokens=10, ignore_eos=True)
NO_TEXT = (
    *("gemma3-images", "mistral3", "internlm3", "qwen2_5_vl", "qwen3_vl", "mistral4", "step3"),
    *(*HYBRIDS_WITH_IMAGES, "llava", "llava_next", "llava_onevision", "idefics3"),
    *("internvl", "smolvlm", "paddleocr_vl"),
    *("qwen3_vl_moe", "kimi_k25"),
)
TEXT = [name for name in FAMILIES if name not in (*NO_TEXT, *HYBRIDS)]
"""What AutoModelForCausalLM builds, without recurrent layers."""
UNEQUAL = ("gemma4", "gemma4-keys", "gemma4-experts")
"""Models whose layers have products of different shapes."""
SHARING = "gemma3n"
"""A model of which some layers have no K and V of their own, and all have projections that adapters
cannot change.
"""
EQUAL = [name for name in TEXT if name not in UNEQUAL]
SPARSE = ("phimoe", "granite_moe_swa")
"""Those of them with experts, in whose place PEFT's default targets have names of their own."""
FUSED, GATED, PLAIN = "phi3", "gemma2", "starcoder2"
LATENT = ("youtu", "minicpm3")
"""Those that attend to latents, whose queries, keys and values adapters cannot change."""


def some_of(names: list[str], *by_default: str) -> list[object]:
    """All names, those that run by default without a mark."""
    marks = {name: () if name in by_default else (pytest.mark.full,) for name in names}
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def prompts_of(*lengths: int) -> list[list[int]]:
    return [[random.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(
    "name",
    some_of([name for name in EQUAL if name not in (*SPARSE, SHARING)], FUSED, GATED, PLAIN),
)
def test_adapters_compute_what_pefts_do(name: str, tmp_path: Path) -> None:
    """All projections changed that can be, in one batch with the plain model."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    models = PeftModels(make_family(name, tmp_path / "model", seed), tmp_path)
    targets = {"target_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"]}
    digest = models.add(seed + 1, r=5, **(targets if name in LATENT else {}))
    # Phi-3's longer rotations are for contexts beyond the original length.
    prompts = prompts_of(33, 18)
    settings = {"dtype": "float32", "page_size": PAGE, "prefill_chunk_tokens": 16}
    with LLM(models.model_dir, enable_lora=True, num_pages=64, **settings) as llm:
        assert llm.load_adapter(models.directories[digest]) == digest
        adapters = [digest, BASE]
        samples = llm.generate(prompts, stop=STOP, top_logprobs=5, adapters=adapters)
        for prompt, adapter, sample in zip(prompts, adapters, samples, strict=True):
            models.check(adapter, prompt, sample)


def test_adapters_of_layers_that_share_keys_and_values(tmp_path: Path) -> None:
    """PEFT made tensors of K and V that nothing reads where transformers still built them."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    models = PeftModels(make_family(SHARING, tmp_path / "model", seed), tmp_path)
    targets = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
    digest = models.add(seed + 1, r=5, target_modules=targets)
    older = shutil.copytree(models.directories[digest], tmp_path / "older")
    tensors = load_file(older / "adapter_model.safetensors")
    own = [name for name in tensors if ".1.self_attn.k_proj." in name or ".1.self_attn.v_" in name]
    unused = {name.replace(".1.", ".4."): torch.randn(tensors[name].shape) for name in own}
    assert len(unused) == 4
    assert unused.keys().isdisjoint(tensors)
    save_file(tensors | unused, older / "adapter_model.safetensors")
    prompts = prompts_of(33, 18, 33)
    settings = {"dtype": "float32", "page_size": PAGE, "prefill_chunk_tokens": 16}
    with LLM(models.model_dir, enable_lora=True, num_pages=64, **settings) as llm:
        assert llm.load_adapter(models.directories[digest]) == digest
        adapters = [digest, BASE, llm.load_adapter(older)]
        samples = llm.generate(prompts, stop=STOP, top_logprobs=5, adapters=adapters)
    for prompt, adapter, sample in zip(prompts, (digest, BASE, digest), samples, strict=True):
        models.check(adapter, prompt, sample)


DRAFTED = [
    (name, drafter)
    for name in FAMILIES
    for drafter in ("eagle3", "ngram")
    if drafter == "ngram" or (name in EQUAL and name != SHARING)
]
BY_DEFAULT = (
    *(("cohere2", "eagle3"), ("cohere2", "ngram"), ("gemma3", "eagle3"), ("gemma4", "ngram")),
)


@pytest.mark.parametrize(
    ("name", "drafter"),
    [pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.full) for case in DRAFTED],
)
def test_drafts_leave_the_text_as_it_is(name: str, drafter: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    target = make_family(name, tmp_path / "model", seed)
    prompts = prompts_of(30, 5, 17)
    prompts.append(prompts[0][:PAGE] * 4)
    settings = {"dtype": "float32", "page_size": PAGE, "prefill_chunk_tokens": 16, "num_pages": 64}
    params, stop = SamplingParams(temperature=0.0), StopCriteria(max_tokens=30, ignore_eos=True)
    with LLM(target, **settings) as llm:
        expected = llm.generate(prompts, params, stop)
    if drafter == "eagle3":
        settings["draft_dir"] = make_tiny_draft(tmp_path / "head", target, seed)
    with LLM(target, drafter=drafter, **settings) as llm:
        drafted = llm.generate(prompts, params, stop)
    assert [sample.token_ids for sample in drafted] == [sample.token_ids for sample in expected]


@pytest.mark.parametrize("name", some_of([*UNEQUAL, SHARING, "step3"], "gemma4"))
def test_layers_of_different_shapes_take_no_draft_head(name: str, tmp_path: Path) -> None:
    target = make_family(name, tmp_path / "model", 1)
    make_family("gemma3", tmp_path / "other", 1)
    head = make_tiny_draft(tmp_path / "head", tmp_path / "other", 1)
    with pytest.raises(ModelError, match="draft heads"):
        LLM(target, dtype="float32", page_size=PAGE, num_pages=64, drafter="eagle3", draft_dir=head)
