"""Whole decoder layers with adapters as a GPU runs them, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import poison_new_memory
from weft.testing.kernels.lora_layers import Sizes, make_layers

pytestmark = pytest.mark.needs("triton-interpreter")

SIZES = Sizes(hidden=72, inner=80, heads=4, kv_heads=2, dim=16)
RANKS = [0, 8, 16, 3, 0, 40]
"""By slot."""


@pytest.mark.parametrize("rows", [5, 21])
def test_rows_with_adapters(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    poison_new_memory(monkeypatch)
    case = make_layers(SIZES, rows, RANKS, torch.float32, "cpu")
    exact, peer = case.written_out(torch.float64), case.written_out(torch.float32)
    with as_on_gpu():
        out, without = case.output(case.lora), case.output(None)
    assert_as_exact(out, peer, exact, slack=1e-5)
    has_adapter = torch.tensor(case.slots) > 0
    assert ((out - without)[has_adapter].abs() > 1e-3).any(dim=1).all()
