"""Recurrent operations by chunks, and what layers compute of rows, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.gated_delta import delta_gates, triton_gates
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.gated_norm import gated_norm, triton_norm
from weft.kernels.ops.gated_norm.spec import GateForm
from weft.kernels.ops.mamba2 import mamba2_reference
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.recurrence.triton_chunks import chunked_recurrence
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

CU_LENS = torch.tensor([0, 70, 73, 150])
SEQUENCES = Sequences.of(CU_LENS)
ROWS, HEADS, KEYS, VALUES = 150, 2, 24, 40


def close(made: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for mine, wanted in zip(made, expected, strict=True):
        bound = 2**-8 * float(wanted.abs().max())
        torch.testing.assert_close(mine.double(), wanted.double(), rtol=0.0, atol=bound)


@pytest.mark.parametrize(("spread", "by_element"), [(1.0, False), (0.1, False), (0.3, True)])
def test_gated_delta(spread: float, by_element: bool) -> None:
    """Keys in all directions, and keys that are nearly one; decays of elements are strong too."""
    fresh_seed()
    q, k = torch.randn(2, ROWS, 1, KEYS) * spread
    k += torch.randn(KEYS)
    q, k, v = q.half(), k.half(), torch.randn(ROWS, HEADS, VALUES).half()
    decay, beta = -torch.rand(ROWS, HEADS) / 8, torch.rand(ROWS, HEADS)
    if by_element:
        decay = decay[..., None] * 400 * torch.rand(ROWS, HEADS, KEYS) ** 8
    states = torch.randn(3, HEADS, KEYS, VALUES)
    rows = HeadRows(q, k, v, decay, SEQUENCES, beta=beta, scale=KEYS**-0.5, is_unit=True)
    made = chunked_recurrence(rows, states)
    wide = (each.double() for each in (q, k, v, decay, beta, states))
    close(made, gated_delta_reference(*wide, CU_LENS))


def test_mamba2() -> None:
    fresh_seed()
    x, (b, c) = torch.randn(ROWS, HEADS, VALUES).half(), torch.randn(2, ROWS, 1, KEYS).half()
    dt, a, d = torch.rand(ROWS, HEADS), -torch.rand(HEADS), torch.randn(HEADS)
    states = torch.randn(3, HEADS, KEYS, VALUES)
    made = chunked_recurrence(HeadRows(c, b, x, dt * a, SEQUENCES, steps=dt, skips=d), states)
    wide = (each.double() for each in (x, dt, a, b, c, d, states))
    close(made, mamba2_reference(*wide, CU_LENS))


@pytest.mark.parametrize("form", ["silu", "sigmoid"])
@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_with_gates(form: GateForm, has_weight: bool) -> None:
    fresh_seed()
    x, gate = torch.randn(5, 6, 20), torch.randn(5, 3, 47)[..., :40].unflatten(2, (2, 20))
    for weight in (torch.randn(20), torch.randn(6, 20)) if has_weight else (None,):
        for first in (False, True):
            settings = {"form": form, "gates_first": first}
            made = triton_norm.gated_norm(x, gate, weight, 1e-3, **settings)
            torch.testing.assert_close(made, gated_norm(x, gate, weight, 1e-3, **settings))


def test_gates() -> None:
    fresh_seed()
    ba, rates, bias = torch.randn(7, 24) * 9, -torch.rand(12), torch.randn(12)
    for shared in (12, 3):
        made = triton_gates.delta_gates(ba, rates, bias, shared)
        torch.testing.assert_close(made, delta_gates(ba, rates, bias, shared))
