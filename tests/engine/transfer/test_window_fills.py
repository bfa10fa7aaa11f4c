"""Fills of models with sliding windows: they bring all pages of layers without a window, and of the
others what the owner still needs.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.engine.engine_storm import check_empty
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, WINDOW, VOCAB = 8, 21, 517
SOME = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": SOME, "num_hidden_layers": 4, "use_sliding_window": True},
    "qwen3": {"layer_types": ["full_attention"] * 2 + SOME[:2], "num_hidden_layers": 4},
    "mistral": {"num_hidden_layers": 3},
}
"""Window pages as long as three pages of the first group, half as long, and twice as long."""


@pytest.fixture(
    params=["qwen2", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("qwen3", "mistral"))],
    scope="module",
)
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    overrides = {"sliding_window": WINDOW, "use_sliding_window": True, **KINDS[request.param]}
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed, **overrides)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int], num_new: int) -> list[int]:
    inputs = torch.tensor([prompt])
    settings = {"max_new_tokens": num_new, "do_sample": False, "eos_token_id": None}
    mask = torch.ones_like(inputs)
    out = model.generate(inputs, attention_mask=mask, **settings)  # type: ignore[operator]
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def make_pair(model_dir: Path, num_fillers: int = 1, **settings: Any) -> EnginePair:
    clock, values = ManualClock(), {"window_pages": "free", **settings}
    owner = make_engine(model_dir, "decode", clock, **values)
    fillers = [
        make_engine(model_dir, "prefill", clock, **{**values, "worker_id": f"prefill-{number}"})
        for number in range(num_fillers)
    ]
    return EnginePair(owner, fillers, clock)


def check(pair: EnginePair) -> None:
    pair.settle()
    for engine in (pair.owner, *pair.fillers.values()):
        check_empty(engine)
        for window in engine.parts.windows:
            if window._index is not None:
                window._index.check_integrity()


@pytest.mark.parametrize("way", WAYS)
def test_filled_prompts_of_every_length_around_borders(
    model_dir: Path, model: torch.nn.Module, way: dict[str, Any]
) -> None:
    pair = make_pair(model_dir, **way)
    try:
        lengths = [*range(WINDOW - 2, WINDOW + PAGE + 3), *random.sample(range(60, 160), 4)]
        for length in lengths:
            prompt = random_prompt(length)
            assert pair.finish(pair.submit(prompt, 6)) == [greedy(model, prompt, 6)]
        counters = pair.owner.counters()
        assert counters["fills_done"] == sum(length > PAGE for length in lengths)
        assert not counters["fills_failed"]
        check(pair)
    finally:
        pair.close()
