"""Fields of configurations that change a layer's arithmetic only for some inputs or contexts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.models.choices import check_choices, where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.families import make_family
from weft.testing.models.paging import PagedDriver, PagedRequest

pytestmark = pytest.mark.usefixtures("single_thread")

ORIGINAL = 16
"""Of the tiny families with LongRoPE."""


@pytest.fixture
def seed() -> int:
    found = random.randrange(10**6)
    print(f"seed {found}")
    random.seed(found)
    return found


@torch.inference_mode()
def logits_of_weft(path: Path, tokens: list[int], max_context_tokens: int | None = None) -> Any:
    loaded = load_model(path, "float32", max_context_tokens=max_context_tokens)
    return PagedDriver(loaded.model, 40).step([(PagedRequest(), tokens)], range(len(tokens)))


@torch.inference_mode()
def logits_of_transformers(path: Path, tokens: list[int]) -> torch.Tensor:
    found: torch.Tensor = load_reference(path)(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def shorten_steps(path: Path) -> None:
    """Half of the heads' time steps become about e^-8, below every usual `time_step_min`."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("dt_bias"):
            tensor[::2] -= 8.0
    save_file(tensors, file, metadata={"format": "pt"})


def test_short_time_steps_of_nemotron_h_stay_as_they_are(tmp_path: Path, seed: int) -> None:
    """`time_step_min` is for the initialisation alone, in mamba-ssm and in NVIDIA's own file of the
    model. transformers raises time steps to it; with 0.0 it computes what the others do.
    """
    path = make_family("nemotron_h", tmp_path / "model", seed)
    shorten_steps(path)
    tokens = [random.randrange(3, 259) for _ in range(45)]
    assert json.loads((path / "config.json").read_text())["time_step_min"] == 0.001
    found = logits_of_weft(path, tokens)
    change_config(path, time_step_min=0.0)
    assert gap(found, logits_of_transformers(path, tokens)) < 5e-4
    # The test is about something: raised time steps would be far from this, by
    # 1.7e-2 in most models and 8e-3 in one of a hundred.
    change_config(path, time_step_min=0.001)
    assert gap(found, logits_of_transformers(path, tokens)) > 1e-3


@pytest.mark.parametrize("name", ["nemotron_h", "bamba", "granite_hybrid-dense", "falcon_h1"])
def test_time_steps_keep_to_their_limit(name: str, tmp_path: Path, seed: int) -> None:
    path = make_family(name, tmp_path / "model", seed)
    shorten_steps(path)
    tokens = [random.randrange(3, 259) for _ in range(45)]
    free = logits_of_weft(path, tokens)
    largest = float("inf") if name == "nemotron_h" else 0.6
    # transformers calls the lower limit time_step_min in the one, and knows no upper one.
    change_config(path, time_step_limit=[0.05, largest], time_step_min=0.05)
    found = logits_of_weft(path, tokens)
    assert gap(found, logits_of_transformers(path, tokens)) < 5e-4
    assert gap(found, free) > 5e-3


@pytest.mark.parametrize("name", ["phi3", "phimoe"])
def test_short_contexts_take_the_short_factors_of_longrope(
    name: str, tmp_path: Path, seed: int
) -> None:
    path = make_family(name, tmp_path / "model", seed)
    tokens = [random.randrange(3, 259) for _ in range(ORIGINAL)]
    expected = logits_of_transformers(path, tokens)
    for longest in (ORIGINAL, 9):
        found = logits_of_weft(path, tokens[:longest], longest)
        with where_experts_are_sure(lambda: load_reference(path), tokens):
            assert gap(found, expected[:longest]) < 5e-5
    # Where a context may be longer, every request has the long ones, whose pages they share.
    for longest in (ORIGINAL + 1, None):
        assert gap(logits_of_weft(path, tokens, longest), expected) > 1e-3
    tokens.append(7)
    found = logits_of_weft(path, tokens, ORIGINAL + 1)
    with where_experts_are_sure(lambda: load_reference(path), tokens):
        assert gap(found, logits_of_transformers(path, tokens)) < 5e-5


def test_an_engine_for_short_contexts_writes_other_pages(tmp_path: Path, seed: int) -> None:
    path = make_family("phi3", tmp_path / "model", seed)
    prompt = [random.randrange(3, 259) for _ in range(9)]
    stop = StopCriteria(max_tokens=ORIGINAL - 9, ignore_eos=True)
    digests = []
    for longest in (ORIGINAL, ORIGINAL + 1):
        with LLM(path, dtype="float32", num_pages=40, max_context_tokens=longest) as llm:
            digests.append(llm.engine.info.model_digest)
            (sample,) = llm.generate([prompt], stop=stop)
        if longest == ORIGINAL:
            logits = logits_of_transformers(path, [*prompt, *sample.token_ids])
            check_choices(logits[8:-1], sample.token_ids)
    assert digests[0] != digests[1]
