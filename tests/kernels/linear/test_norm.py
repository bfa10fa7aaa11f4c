"""RMS norm against float64 on fresh random inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.norm import add_rms_norm, rms_norm
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)

EPS = 1e-5


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 72, 576, 1000])
@pytest.mark.parametrize("rows", [0, 1, 3, 65])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x = (torch.randn(rows, width) * 3).to(dtype)
    fine, before = torch.randn(width), x.clone()
    # Finer than the rows, and like them.
    for weight in (fine, fine.to(dtype)):
        out, eager = rms_norm(x, weight, EPS), F.rms_norm(x, (width,), weight.to(dtype), EPS)
        assert out.dtype == dtype
        assert_as_exact(out, eager, exact_norm(x, weight))
    assert torch.equal(x, before)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 576), (2, 72), (33, 200)])
def test_add_rms_norm(rows: int, width: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    total = x + residual
    out, updated = add_rms_norm(x, residual, weight, EPS)
    assert updated is residual
    assert torch.equal(residual, total)
    assert_as_exact(out, F.rms_norm(total, (width,), weight, EPS), exact_norm(total, weight))


@pytest.mark.usefixtures("path")
def test_tiny_and_huge_rows_keep_their_scale() -> None:
    weight = torch.ones(40)
    x = torch.stack((torch.full((40,), 1e-12), torch.full((40,), 1e15), torch.zeros(40)))
    out = rms_norm(x, weight, EPS)
    for row, exact in zip(out, exact_norm(x, weight), strict=True):
        assert_as_exact(row, row, exact, factor=0)


def test_arguments_that_do_not_fit_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    x = torch.randn(4, 64)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(63), EPS)
    with pytest.raises(ValueError, match="weight"):
        rms_norm(x, torch.ones(64).bfloat16(), EPS)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm(torch.randn(64, 4).T, torch.ones(64), EPS)
    with pytest.raises(ValueError, match="residual"):
        add_rms_norm(x, torch.randn(3, 64), torch.ones(64), EPS)


@pytest.mark.full
def test_the_check_sees_a_dropped_tail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    native = mutated_native_cpu(
        tmp_path,
        "rows.h",
        "vf total = {0};\n  for (long i = 0; i < n; i += VL) {",
        "vf total = {0};\n  for (long i = 0; i + VL <= n; i += VL) {",
    )
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    x, weight = torch.randn(3, 77), torch.randn(77)
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact(
            rms_norm(x, weight, EPS), F.rms_norm(x, (77,), weight, EPS), exact_norm(x, weight)
        )
