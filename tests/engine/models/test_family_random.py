"""Random configurations of the families against transformers, in float32, over random cuts."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weft.engine.model.loader import load_model
from weft.testing.models import reference_models
from weft.testing.models.every_family import (
    EVERY_FAMILY,
    OF_REFERENCES,
    write_model,
)
from weft.testing.models.families import FAMILIES, HYBRIDS, HYBRIDS_WITH_IMAGES, SIZES
from weft.testing.models.paging import PagedDriver, PagedRequest

pytestmark = pytest.mark.usefixtures("single_thread")

BY_DEFAULT = ("gemma4", "step3", "ling2", "granite-shared", "flex-olmo")
FIXED_HEADS = (
    *("mistral4", "gemma4-keys", "gemma4-experts", "stablelm", "gemma4", "kimi_linear"),
    *("kimi_k25", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "glm4-moe-lite"),
    *("laguna", "mimo", "youtu", "minicpm3", "ling3", "sarvam-mla"),
)
"""Families whose other sizes go with the number of K and V heads."""
_COUNTS = {
    "n_routed_experts": ("num_experts_per_tok",),
    "num_experts": ("num_experts_per_tok", "moe_topk"),
    "num_local_experts": ("num_experts_per_tok",),
    "moe_num_experts": ("moe_k",),
}
"""Fields of the number of experts, and of those that a token is routed to."""


@st.composite
def overrides(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Fields of the text model."""
    own = OF_REFERENCES[name][1] if name in OF_REFERENCES else FAMILIES[name][1]
    sizes = reference_models.SIZES if name in OF_REFERENCES else SIZES
    text = {**sizes, **own.get("text_config", own)}
    heads = text["num_attention_heads"]
    marks = [own[key] or 0 for key in own if key.endswith(("_token_id", "_token_index"))]
    made: dict[str, Any] = {
        "intermediate_size": 4 * draw(st.integers(2, 30)),
        "vocab_size": draw(st.integers(max([40, *(1 + mark for mark in marks)]), 300)),
    }
    made |= {own: made["intermediate_size"] for own in ("n_inner", "ffn_dim") if own in text}
    if name not in FIXED_HEADS and "num_sliding_attention_heads" not in text:
        counts = [count for count in range(1, heads + 1) if heads % count == 0]
        made["num_key_value_heads"] = draw(st.sampled_from(counts))
    if "sliding_window" in text:
        made["sliding_window"] = draw(st.integers(2, 80))
    if "vocab_size_per_layer_input" in text:
        made["vocab_size_per_layer_input"] = made["vocab_size"]
    made |= draw(experts(text))
    return {"text_config": {**text, **made}} if "text_config" in own else made


@st.composite
def experts(draw: st.DrawFn, text: Mapping[str, Any]) -> dict[str, Any]:
    """Other numbers and sizes of a model's experts, if it has some."""
    name = next((name for name in _COUNTS if name in text), None)
    chosen = next((each for each in _COUNTS[name] if each in text), None) if name else None
    if name is None or chosen is None:
        return {}
    groups = text.get("n_group") or 1
    of_group = draw(st.integers(2, 9 if groups == 1 else 4))
    made = {
        name: groups * of_group,
        chosen: draw(st.integers(1, of_group * (text.get("topk_group") or 1))),
    }
    if "router_jitter_noise" in text:
        made[chosen] = 2  # SparseMixer is for two.
    if "moe_intermediate_size" in text:
        made["moe_intermediate_size"] = 4 * draw(st.integers(2, 20))
    return made


@torch.inference_mode()
def logits_of(reference: Any, tokens: list[int], change: torch.Tensor | float = 1.0) -> Any:
    """All logits, with the embedding multiplied by a change."""
    embedding = reference.get_input_embeddings().weight
    kept = embedding.clone()
    embedding.mul_(change)
    found = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    embedding.copy_(kept)
    return found


def largest_gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def is_near_tie(reference: Any, tokens: list[int], expected: torch.Tensor, error: float) -> bool:
    """Whether the reference itself differs as much by a change of some roundings: two experts are
    nearly alike then, and which one is asked is not determined.
    """
    shape = reference.get_input_embeddings().weight.shape
    changes = [3e-6 * torch.randn(shape) for _ in range(8)]  # One alone may not turn them over.
    both = [1 + change for change in (*changes, *(-change for change in changes))]
    return any(largest_gap(logits_of(reference, tokens, c), expected) > error / 2 for c in both)


def check(name: str, fields: dict[str, Any], seed: int, cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        reference = write_model(name, path, seed, **fields)
        model = load_model(path, "float32").model
        generator = torch.Generator().manual_seed(seed)
        size = (sum(cuts),)
        tokens = torch.randint(3, model.config.vocab_size, size, generator=generator).tolist()
        driver, request, rows = PagedDriver(model, 40), PagedRequest(), []
        for cut in cuts:
            begin = request.num_cached
            taken = [(request, tokens[begin : begin + cut])]
            rows.append(driver.step(taken, range(cut)))
        expected = logits_of(reference, tokens)
        error = largest_gap(torch.cat(rows), expected)
        # Transformers computes states in chunks, by sums in another order.
        is_near = error < (5e-4 if name in (*HYBRIDS, *HYBRIDS_WITH_IMAGES) else 5e-5)
        assert is_near or is_near_tie(reference, tokens, expected, error), error


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full)
        for name in EVERY_FAMILY
    ],
)
def test_random_configurations(name: str, pytestconfig: pytest.Config) -> None:
    examples = 50 if pytestconfig.getoption("--full") else 1

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    @given(
        overrides(name), st.integers(0, 2**31), st.lists(st.integers(1, 40), min_size=1, max_size=5)
    )
    def run(fields: dict[str, Any], seed: int, cuts: list[int]) -> None:
        # LongRoPE's factors of longer contexts are those that are served.
        own = {} if name in OF_REFERENCES else FAMILIES[name][1]
        rest = own.get("original_max_position_embeddings", 0) - sum(cuts)
        check(name, fields, seed, [*cuts, 1 + rest] if rest >= 0 else cuts)

    run()
