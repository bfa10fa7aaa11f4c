"""Weights changed in place, in every architecture: logits equal those of a fresh load."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.engine.model.loader import load_model
from weft.engine.model.weights.refill import pairs_of
from weft.testing.models.families import FAMILIES, make_family
from weft.testing.models.paging import PagedDriver, PagedRequest

IN_EVERY_RUN = ("gemma2",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.full)
        for name in FAMILIES
    ],
)
def test_logits_after_a_refit_are_a_fresh_loads(name: str, tmp_path: Path) -> None:
    first, second = (make_family(name, tmp_path / str(seed), seed) for seed in (1, 2))
    model, fresh = load_model(first, "float32"), load_model(second, "float32")
    tokens = [random.randrange(3, model.config.vocab_size) for _ in range(40)]
    # What is made on first use is made of the old weights.
    before = PagedDriver(model.model, 8).step([(PagedRequest(), tokens)])
    assert model.refit.from_folder(second) == fresh.digest
    assert model.refit.packed_digest() == fresh.refit.packed_digest()
    for place, own, right in pairs_of(model.model, fresh.model):
        assert torch.equal(own, right), place
    found = PagedDriver(model.model, 8).step([(PagedRequest(), tokens)])
    expected = PagedDriver(fresh.model, 8).step([(PagedRequest(), tokens)])
    assert torch.equal(found, expected)
    assert not torch.equal(found, before)
