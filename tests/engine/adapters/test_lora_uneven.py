"""Adapters of models whose layers have products of different shapes: Gemma 4, Laguna, MiMo, Step 3,
Nemotron-H, Kimi Linear, Ling 3. Tokens and log-probabilities are PEFT's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.errors import AdapterError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import OF_STATES
from weft.testing.models.every_family import write_model
from weft.testing.models.lora_reference import BASE, PeftModels, unload_all
from weft.testing.models.tiny_adapters import write_adapter

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB = 8, 259
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "max_running_requests": 4,
    "poison_free_pages": True,
    "enable_lora": True,
}
ATTENTION, MLP = r"self_attn\.[qkvo]_proj", r"mlp\.(gate|up|down)_proj"
MIXER = r"mixer\.([qkvo]|in|up|down)_proj"
DELTA = r"layers\.(0|2|4|6)\.self_attn\.[qkv]_proj"
CASES = {
    "gemma4": (ATTENTION, MLP),
    "gemma4-keys": (ATTENTION, MLP),
    "gemma4-experts": (ATTENTION, MLP),
    "laguna": (ATTENTION, MLP),
    "mimo": (ATTENTION, MLP),
    "step3": (r"language_model.*" + ATTENTION, r"language_model.*" + MLP),
    "nemotron_h": (MIXER, r"mixer\.(in|up)_proj"),
    "nemotron_h-experts": (r"mixer\.([qkvo]|in)_proj", r"mixer\.q_proj"),
    "kimi_linear": (rf"({DELTA}|.*o_proj)", rf"(.*o_proj|.*{MLP})"),
}
"""Patterns of the modules that two adapters change."""
QUICK = ("gemma4", "nemotron_h")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in CASES]
)
def test_texts_are_pefts(name: str, tmp_path: Path, seed: int) -> None:
    """Adapters side by side, in chunks, then from prefixes that each has for itself."""
    write_model(name, tmp_path / "model", seed)
    models = PeftModels(tmp_path / "model", tmp_path)
    adapters = [
        models.add(seed + rank, r=rank, target_modules=f".*{pattern}")
        for rank, pattern in zip((5, 11), CASES[name], strict=True)
    ]
    with LLM(models.model_dir, **SETTINGS) as llm:
        assert [llm.load_adapter(path) for path in models.directories.values()] == adapters
        prompt = [random.randrange(3, VOCAB) for _ in range(45)]
        asked = [*adapters, BASE]
        stop = StopCriteria(max_tokens=6, ignore_eos=True)
        for _ in range(2):
            samples = llm.generate([prompt] * 3, stop=stop, top_logprobs=20, adapters=asked)
            for adapter, sample in zip(asked, samples, strict=True):
                models.check(adapter, prompt, sample, OF_STATES)
        assert llm.engine.counters()["prefix_hit_tokens"] > 0
        unload_all(llm.engine)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gemma4", "mimo", "nemotron_h"])
def test_drafts(name: str, tmp_path: Path, seed: int) -> None:
    write_model(name, tmp_path / "model", seed)
    models = PeftModels(tmp_path / "model", tmp_path)
    adapter = models.add(seed, r=5, target_modules=f".*{CASES[name][0]}")
    with LLM(models.model_dir, drafter="ngram", **SETTINGS) as llm:
        llm.load_adapter(models.directories[adapter])
        prompt = [random.randrange(3, VOCAB) for _ in range(20)] * 3
        stop = StopCriteria(max_tokens=12, ignore_eos=True)
        (sample,) = llm.generate([prompt], stop=stop, top_logprobs=20, adapters=[adapter])
        models.check(adapter, prompt, sample, OF_STATES)


def test_what_a_layer_lacks_is_refused(tmp_path: Path) -> None:
    def adapter(module: str, width: int, rows: int) -> Path:
        halves = {"A": torch.zeros(8, width), "B": torch.zeros(rows, 8)}
        tensors = {f"base_model.model.{module}.lora_{half}.weight": t for half, t in halves.items()}
        folder = tmp_path / module.replace(".", "-")
        return write_adapter(folder, tensors, target_modules=[module.rpartition(".")[2]])

    lacks, wrong = "has no such proj", r"has shape \(.*\); the model .* ask for"
    for name, module, rows, told in (
        ("nemotron_h", "backbone.layers.0.mixer.q_proj", 48, lacks),
        ("nemotron_h", "backbone.layers.0.mixer.up_proj", 72, lacks),
        ("nemotron_h", "backbone.layers.99.mixer.in_proj", 48, "the model has|has no such proj"),
        ("gemma4-keys", "model.layers.0.self_attn.q_proj", 7, wrong),
        ("kimi_linear", "model.layers.1.self_attn.q_proj", 48, lacks),
    ):
        folder = tmp_path / name
        if not folder.exists():
            write_model(name, folder, 0)
        with LLM(folder, **SETTINGS) as llm, pytest.raises(AdapterError, match=told):
            llm.load_adapter(adapter(module, 48, rows))
