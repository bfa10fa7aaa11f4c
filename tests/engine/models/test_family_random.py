"""Random configurations of the families against transformers, in float32, over random cuts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from weft.engine.model.loader import load_model
from weft.testing.models.families import FAMILIES, HYBRIDS, SIZES, make_family
from weft.testing.models.paging import PagedDriver, PagedRequest

pytestmark = pytest.mark.usefixtures("single_thread")

BY_DEFAULT = ("gemma4", "step3")
FIXED_HEADS = (
    *("mistral4", "gemma4-keys", "gemma4-experts", "stablelm", "gemma4", "kimi_linear"),
    "kimi_k25",
)
"""Families whose other sizes go with the number of K and V heads."""


@st.composite
def overrides(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """Fields of the text model."""
    own = FAMILIES[name][1]
    text = {**SIZES, **own.get("text_config", own)}
    heads = text["num_attention_heads"]
    made: dict[str, Any] = {
        "intermediate_size": 4 * draw(st.integers(2, 30)),
        "vocab_size": draw(st.integers(40, 300)),
    }
    if name not in FIXED_HEADS and "num_sliding_attention_heads" not in text:
        counts = [count for count in range(1, heads + 1) if heads % count == 0]
        made["num_key_value_heads"] = draw(st.sampled_from(counts))
    if "sliding_window" in text:
        made["sliding_window"] = draw(st.integers(2, 80))
    if "vocab_size_per_layer_input" in text:
        made["vocab_size_per_layer_input"] = made["vocab_size"]
    return {"text_config": {**text, **made}} if "text_config" in own else made


def check(name: str, fields: dict[str, Any], seed: int, cuts: list[int]) -> None:
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = make_family(name, Path(folder) / "model", seed, **fields)
        config = transformers.AutoConfig.from_pretrained(path)
        build: Any = transformers.AutoModelForCausalLM
        if hasattr(config, "vision_config"):
            build = transformers.AutoModelForImageTextToText
        reference = build.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        model = load_model(path, "float32").model
        generator = torch.Generator().manual_seed(seed)
        size = (sum(cuts),)
        tokens = torch.randint(3, model.config.vocab_size, size, generator=generator).tolist()
        driver, request, rows = PagedDriver(model, 40), PagedRequest(), []
        for cut in cuts:
            begin = request.num_cached
            taken = [(request, tokens[begin : begin + cut])]
            rows.append(driver.step(taken, range(cut)))
        with torch.inference_mode():
            expected = reference(torch.tensor([tokens]), use_cache=False).logits[0]
        made = torch.cat(rows)
        error = float((made - expected).abs().max() / expected.abs().max())
        # Transformers computes states in chunks, by sums in another order.
        assert error < (5e-4 if name in HYBRIDS else 5e-5), error


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in BY_DEFAULT else pytest.mark.full) for name in FAMILIES],
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
        rest = FAMILIES[name][1].get("original_max_position_embeddings", 0) - sum(cuts)
        check(name, fields, seed, [*cuts, 1 + rest] if rest >= 0 else cuts)

    run()
