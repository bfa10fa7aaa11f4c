"""Adapters of models with recurrent layers: tokens and log-probabilities are PEFT's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import AdapterError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import OF_STATES
from weft.testing.models.families import make_family
from weft.testing.models.lora_reference import BASE, PeftModels, unload_all
from weft.testing.models.tiny_adapters import write_adapter

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB = 8, 259
FULL = pytest.mark.full
ATTENTION = ["q_proj", "k_proj", "v_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": PAGE,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "checkpoint_tokens": 2 * PAGE,
    "max_running_requests": 4,
    "poison_free_pages": True,
    "enable_lora": True,
}
CASES: list[Any] = [
    (
        "qwen3_5",
        [*ATTENTION, "o_proj", *MLP],
        [*(f"in_proj_{name}" for name in ("qkv", "z", "b", "a")), "out_proj"],
    ),
    pytest.param(
        *("qwen3_next", [*ATTENTION, "o_proj"], ["in_proj_qkvz", "in_proj_ba", "out_proj"]),
        marks=FULL,
    ),
    pytest.param("bamba", [*ATTENTION, "o_proj", *MLP], ["in_proj", "out_proj"], marks=FULL),
    pytest.param("granite_hybrid", [*ATTENTION, "o_proj"], ["in_proj", "out_proj"], marks=FULL),
    pytest.param("falcon_h1", [*ATTENTION, "o_proj", *MLP], ["in_proj"], marks=FULL),
    pytest.param("jamba", [*ATTENTION, "o_proj"], ["in_proj", "out_proj"], marks=FULL),
    pytest.param("lfm2", [*ATTENTION, "w1", "w2", "w3"], ["in_proj", "out_proj"], marks=FULL),
]


@pytest.mark.parametrize(("name", "usual", "recurrent"), CASES)
def test_texts_are_pefts(
    name: str, usual: list[str], recurrent: list[str], tmp_path: Path, seed: int
) -> None:
    """Adapters side by side, in chunks, then from prefixes that each has for itself."""
    models = PeftModels(make_family(name, tmp_path / "model", seed), tmp_path)
    targets = ([*usual, *recurrent], recurrent, usual)
    adapters = [
        models.add(seed + index, r=5, target_modules=some) for index, some in enumerate(targets)
    ]
    with LLM(models.model_dir, **SETTINGS) as llm:
        assert [llm.load_adapter(path) for path in models.directories.values()] == adapters
        prompt = [random.randrange(3, VOCAB) for _ in range(45)]
        asked = [*adapters, BASE]
        stop = StopCriteria(max_tokens=6, ignore_eos=True)
        for _ in range(2):
            samples = llm.generate([prompt] * 4, stop=stop, top_logprobs=20, adapters=asked)
            for adapter, sample in zip(asked, samples, strict=True):
                models.check(adapter, prompt, sample, OF_STATES)
        assert llm.engine.counters()["prefix_hit_tokens"] == 4 * (44 // PAGE * PAGE)
        unload_all(llm.engine)


def test_a_change_of_what_a_layer_lacks_is_refused(tmp_path: Path) -> None:
    path = make_family("bamba", tmp_path / "model", 0)
    import torch

    def adapter(module: str, width: int, rows: int) -> Path:
        name = f"base_model.model.model.layers.{module}.lora_"
        halves = {"A": torch.zeros(8, width), "B": torch.zeros(rows, 8)}
        tensors = {f"{name}{half}.weight": tensor for half, tensor in halves.items()}
        folder = tmp_path / module.replace(".", "-")
        return write_adapter(folder, tensors, target_modules=[module.rpartition(".")[2]])

    with LLM(path, **SETTINGS) as llm:
        for module in ("0.self_attn.q_proj", "1.mamba.in_proj", "1.self_attn.out_proj"):
            with pytest.raises(AdapterError, match="this layer of the model has no such proj"):
                llm.load_adapter(adapter(module, 48, 48))
