"""Gated activation against float64 on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import DTYPES, assert_as_exact, fresh_seed


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 16), (1, 1), (1, 1536), (3, 72), (33, 200)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x = (torch.randn(rows, 2 * width) * 8).to(dtype)
    gate, up = x.chunk(2, dim=-1)
    exact = F.silu(gate.double()) * up.double()
    out = silu_and_mul(x)
    assert out.dtype == dtype
    assert_as_exact(out, F.silu(gate) * up, exact)


@pytest.mark.usefixtures("path")
def test_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -104.0, -88.0, -87.0, -30.0, 0.0, 30.0, 87.5, 89.0, 1e4, 1e30])
    out = silu_and_mul(torch.stack((gates, torch.ones_like(gates)), dim=1))
    exact = F.silu(gates.double())
    assert torch.allclose(out[:, 0].double(), exact, rtol=1e-6, atol=1e-35)


@pytest.mark.usefixtures("path")
def test_not_a_number_stays_one() -> None:
    out = silu_and_mul(torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]]))
    assert out.isnan().all()
