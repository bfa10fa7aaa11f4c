"""Adapters in the layers against the same model with the additions merged into its weights."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path

import pytest
import torch
from weft.engine.model.loader import load_model
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.lora_models import RANKS, lora_step, make_adapters, make_experts, merge
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_models import make_tiny


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_every_path_through_the_layers(kind: str, tmp_path: Path) -> None:
    """A chunk without logits, one with few, and decoding, of requests of all adapters at once."""
    seed = random.randrange(1 << 30)
    random.seed(seed)
    torch.manual_seed(seed)
    print(f"seed {seed}")
    path = make_tiny(kind, tmp_path / "base", seed)
    config = json.loads((path / "config.json").read_text())
    is_dense = kind != "qwen3_moe"
    adapters = make_adapters(config, is_dense)
    experts = {} if is_dense else make_experts(config)
    driver = PagedDriver(load_model(path, "float32").model, num_pages=64)
    requests = [PagedRequest() for _ in RANKS]
    tokens = [random.choices(range(config["vocab_size"]), k=12 + slot) for slot in range(4)]

    def step(begin: int, end: int | None, *, has_logits: bool) -> torch.Tensor:
        work = [(r, t[begin:end]) for r, t in zip(requests, tokens, strict=True)]
        batch = driver.batch(work, None if has_logits else [])
        slots = [slot for slot, (_, new) in enumerate(work) for _ in new]
        batch.lora = lora_step(adapters, experts, slots)
        with torch.inference_mode():
            hidden = driver.model.forward(batch, driver.pool)
            return driver.model.logits(hidden, batch.lora.select(batch.logits_rows))

    step(0, 5, has_logits=False)
    few = step(5, 11, has_logits=True)
    last = step(11, 12, has_logits=True)
    for slot in range(len(RANKS)):
        merged = merge(path, tmp_path / f"merged{slot}", adapters, experts, slot)
        alone = PagedDriver(load_model(merged, "float32").model, num_pages=8)
        expected = alone.step([(PagedRequest(), tokens[slot][:12])], [10, 11])
        got = torch.stack((few[slot], last[slot]))
        with where_experts_are_sure(partial(load_reference, merged), tokens[slot][:12]):
            assert (got - expected).abs().max() < 1e-4 * expected.abs().max()
