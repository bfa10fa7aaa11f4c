"""Recurrent operations by chunks on a GPU, in the shapes of models, against float64."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.gated_delta import gated_delta, gated_delta_reference
from weft.kernels.mamba2 import mamba2, mamba2_reference
from weft.kernels.sequences import Sequences

pytestmark = pytest.mark.needs("cuda")

CU_LENS = torch.tensor([0, 3, 700, 1000])
ROWS = 1000


def close(made: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for mine, wanted in zip(made, expected, strict=True):
        bound = 2**-6 * float(wanted.abs().max())
        torch.testing.assert_close(mine.double(), wanted, rtol=0.0, atol=bound)


@pytest.mark.parametrize("by_element", [False, True])
def test_gated_delta(by_element: bool) -> None:
    q, k = torch.randn(2, ROWS, 4, 128, device="cuda").bfloat16()
    v = torch.randn(ROWS, 8, 128, device="cuda").bfloat16()
    if by_element:
        q, k = (part.repeat_interleave(2, dim=1) for part in (q, k))
    decay = -torch.rand((ROWS, 8, 128) if by_element else (ROWS, 8), device="cuda") / 4
    beta, states = torch.rand(ROWS, 8, device="cuda"), torch.randn(3, 8, 128, 128, device="cuda")
    made = gated_delta(q, k, v, decay, beta, states, Sequences.of(CU_LENS.cuda()))
    wide = (each.double() for each in (q, k, v, decay, beta, states))
    close(made, gated_delta_reference(*wide, CU_LENS.cuda()))


def test_mamba2() -> None:
    x = torch.randn(ROWS, 16, 64, device="cuda").bfloat16()
    b, c = torch.randn(2, ROWS, 2, 128, device="cuda").bfloat16()
    dt, a = torch.rand(ROWS, 16, device="cuda"), -torch.rand(16, device="cuda")
    d, states = torch.randn(16, device="cuda"), torch.randn(3, 16, 128, 64, device="cuda")
    made = mamba2(x, dt, a, b, c, d, states, Sequences.of(CU_LENS.cuda()))
    wide = (each.double() for each in (x, dt, a, b, c, d, states))
    close(made, mamba2_reference(*wide, CU_LENS.cuda()))
