"""Recurrent operations as a GPU runs them, by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.mamba2 import mamba2_reference
from weft.kernels.ops.recurrence import triton_steps as gpu
from weft.kernels.ops.recurrence.head_rows import HeadRows
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.short_conv import short_conv_reference
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

ROWS, HEADS, KEYS, VALUES = 9, 4, 12, 40
CU_LENS = torch.tensor([0, 1, 3, ROWS])
SEQUENCES = Sequences.of(CU_LENS)


def close(made: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    bound = 1e-4 if made[0].dtype == torch.float32 else 2**-7
    torch.testing.assert_close(made[0], expected[0], rtol=bound, atol=bound)
    torch.testing.assert_close(made[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_element", [False, True])
def test_gated_delta(dtype: torch.dtype, by_element: bool) -> None:
    fresh_seed()
    # As a layer has them: parts of wider rows.
    q, k = torch.randn(ROWS, HEADS // 2, 2 * KEYS + 3).to(dtype).split([KEYS, KEYS + 3], dim=2)
    k, v = k[..., :KEYS], torch.randn(ROWS, HEADS, VALUES).to(dtype)
    decay = -torch.rand((ROWS, HEADS, KEYS) if by_element else (ROWS, HEADS))
    beta, states = torch.rand(ROWS, HEADS), torch.randn(3, HEADS, KEYS, VALUES)
    before = states.clone()
    rows = HeadRows(q, k, v, decay, SEQUENCES, beta=beta, scale=KEYS**-0.5, is_unit=True)
    made = gpu.recurrence(rows, states)
    close(made, gated_delta_reference(q, k, v, decay, beta, states, CU_LENS))
    assert torch.equal(states, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mamba2(dtype: torch.dtype) -> None:
    fresh_seed()
    x = torch.randn(ROWS, HEADS, VALUES).to(dtype)
    b, c = torch.randn(2, ROWS, HEADS // 2, KEYS).to(dtype)
    dt, a, d = torch.rand(ROWS, HEADS), -torch.rand(HEADS), torch.randn(HEADS)
    states = torch.randn(3, HEADS, KEYS, VALUES)
    made = gpu.recurrence(HeadRows(c, b, x, dt * a, SEQUENCES, steps=dt, skips=d), states)
    close(made, mamba2_reference(x, dt, a, b, c, d, states, CU_LENS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [2, 4])
def test_short_conv(dtype: torch.dtype, taps: int) -> None:
    fresh_seed()
    channels = 300
    x, bias = torch.randn(ROWS, channels).to(dtype), torch.randn(channels)
    weight, tails = torch.randn(taps, channels), torch.randn(3, channels, taps - 1).to(dtype)
    made = gpu.short_conv(x, weight, bias, tails, SEQUENCES, has_silu=True)
    expected = short_conv_reference(x, weight, bias, tails, CU_LENS, has_silu=True)
    close((made[0], made[1].float()), (expected[0], expected[1].float()))
    assert torch.equal(made[1], expected[1])
