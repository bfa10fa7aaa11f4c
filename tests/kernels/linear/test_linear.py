"""Packed linear layers against float64 on fresh random inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear, packing_copies, weight_rows
from weft.kernels.ops.linear.spec import PlainForm
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)

SHAPES = [(1, 1), (5, 7), (16, 72), (33, 200), (576, 576), (100, 1537), (960, 577)]
ROWS = [0, 1, 2, 3, 12, 13, 17, 33]


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    return str(request.param)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_linear(n: int, k: int, dtype: torch.dtype) -> None:
    fresh_seed()
    weight, bias = draw(n, k, dtype=dtype) / k**0.5, draw(n, dtype=dtype)
    plain, biased = pack_linear(weight), pack_linear(weight, bias)
    assert (plain.out_features, plain.in_features, plain.dtype) == (n, k, dtype)
    for rows in ROWS:
        x, residual = draw(rows, k, dtype=dtype), draw(rows, n, dtype=dtype)
        before = residual.clone()
        exact = x.double() @ weight.double().T
        assert_as_exact(linear(x, plain), F.linear(x, weight), exact)
        assert_as_exact(linear(x, biased), F.linear(x, weight, bias), exact + bias.double())
        peer = F.linear(x, weight, bias) + residual
        exact_sum = exact + bias.double() + residual.double()
        assert_as_exact(linear(x, biased, residual), peer, exact_sum)
        assert torch.equal(residual, before)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_of_a_packed_weight_are_those_of_the_original(
    n: int, k: int, dtype: torch.dtype
) -> None:
    fresh_seed()
    weight = draw(n, k, dtype=dtype)
    rows = torch.randint(n, (2 * n + 1,))
    found = weight_rows(pack_linear(weight, draw(n, dtype=dtype)), rows)
    assert found.is_contiguous()
    assert torch.equal(found, weight[rows])
    with pytest.raises(ValueError, match="gate"):
        weight_rows(pack_gate_up(torch.cat((weight, weight))), rows)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_float32_results_of_bfloat16_weights(path: str, n: int, k: int) -> None:
    fresh_seed()
    weight, x = draw(n, k, dtype=torch.bfloat16), draw(5, k, dtype=torch.bfloat16)
    out = linear(x, pack_linear(weight), out_dtype=torch.float32)
    assert out.dtype == torch.float32
    exact = x.double() @ weight.double().T
    if path == "native":
        assert_as_exact(out, F.linear(x.float(), weight.float()), exact, factor=4)
    else:
        assert_as_exact(out, F.linear(x, weight), exact)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "k"), [(1, 8), (17, 72), (1536, 576), (40, 201)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gate_up_silu(inner: int, k: int, with_bias: bool, dtype: torch.dtype) -> None:
    fresh_seed()
    weight = draw(2 * inner, k, dtype=dtype) / k**0.5
    bias = draw(2 * inner, dtype=dtype) if with_bias else None
    packed = pack_gate_up(weight, bias)
    for rows in ROWS:
        x = draw(rows, k, dtype=dtype)
        wide = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        gate, up = wide.chunk(2, dim=-1)
        peer_gate, peer_up = F.linear(x, weight, bias).chunk(2, dim=-1)
        out = gate_up_silu(x, packed)
        # Terms that cancel leave their rounding: of two values torch's may be exact by chance.
        terms = F.linear(
            x.double().abs(), weight.double().abs(), None if bias is None else bias.abs().double()
        )
        gate_terms, up_terms = terms.chunk(2, dim=-1)
        rounding = F.silu(gate).abs() * up_terms + up.abs() * gate_terms
        slack = torch.finfo(torch.float32).eps * rounding.max().item() if rounding.numel() else 0.0
        assert_as_exact(out, F.silu(peer_gate) * peer_up, F.silu(gate) * up, slack=slack)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    fresh_seed()
    packed = pack_linear(draw(200, 136, dtype=dtype))
    x = draw(64, 136, dtype=dtype)
    whole = linear(x, packed)
    for rows in (1, 2, 3, 7, 12, 13, 25, 40):
        assert torch.equal(linear(x[:rows], packed), whole[:rows])
        assert torch.equal(linear(x[64 - rows :], packed), whole[64 - rows :])


def test_values_outside_the_result_stay_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are written into the middle of a guarded buffer."""
    native = cpu.native_cpu()
    if native is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    for dtype in DTYPES:
        for rows, n, k in ((1, 33, 72), (17, 19, 40), (5, 100, 9)):
            weight, x = draw(n, k, dtype=dtype), draw(rows, k, dtype=dtype)
            packed = pack_linear(weight)
            buffer = torch.full((rows * n + 128,), 77.0, dtype=dtype)
            out = buffer[64:-64]
            out.fill_(float("nan"))
            is_bf16 = dtype == torch.bfloat16
            native.linear(
                packed.address, x.data_ptr(), rows, None, out.data_ptr(), is_bf16, None, 0
            )
            exact = x.double() @ weight.double().T
            assert_as_exact(out.view(rows, n), F.linear(x, weight), exact)
            assert (buffer[:64] == 77).all()
            assert (buffer[-64:] == 77).all()


@pytest.mark.usefixtures("path")
def test_the_original_is_not_kept_or_changed() -> None:
    weight = draw(64, 64, dtype=torch.bfloat16)
    before, x = weight.clone(), draw(3, 64, dtype=torch.bfloat16)
    packed = pack_linear(weight)
    assert torch.equal(weight, before)
    expected = linear(x, packed)
    if not isinstance(packed.form, PlainForm):
        weight.zero_()
    else:
        assert not packing_copies(weight.dtype, weight.device)
    assert torch.equal(linear(x, packed), expected)


def test_arguments_that_do_not_fit_are_refused() -> None:
    weight = torch.randn(8, 16)
    with pytest.raises(ValueError, match=r"\[N, K\]"):
        pack_linear(torch.randn(8))
    with pytest.raises(ValueError, match="bias"):
        pack_linear(weight, torch.randn(7))
    with pytest.raises(ValueError, match="even"):
        pack_gate_up(torch.randn(7, 16))
    packed = pack_linear(weight)
    if packed.native is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    for x in (torch.randn(2, 15), torch.randn(2, 16).bfloat16(), torch.randn(16, 2).T):
        with pytest.raises(ValueError, match="does not fit"):
            linear(x, packed)
    for residual in (torch.randn(2, 7), torch.randn(8, 2).T, torch.randn(2, 8).bfloat16()):
        with pytest.raises(ValueError, match="residual"):
            linear(torch.randn(2, 16), packed, residual)


REFUSED = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("sp", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
small = Stack(ctypes.addressof(memory), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(small), None) == 0
import torch
from weft.engine.executor.device import missing_native
from weft.kernels.shared import cpu
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
native = cpu.native_cpu()
assert native.is_amx_refused and not native.has_amx
(notice,) = missing_native(torch.device("cpu"))
assert "refuses AMX" in notice, notice
x, weight = torch.randn(40, 96).bfloat16(), torch.randn(64, 96).bfloat16()
exact = x.double() @ weight.double().T
assert (linear(x, pack_linear(weight)) - exact).abs().max() < 0.01 * exact.abs().max()
"""
"""A thread whose stack for signals is too small for AMX's state: the system refuses it then."""


def test_a_refusal_of_amx_is_told_and_served_without() -> None:
    native = cpu.native_cpu()
    if native is None or not native.has_amx:
        pytest.skip("needs a CPU with AMX")
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full_after(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_sees_a_dropped_step(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = cpu.native_cpu()
    if native is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    on_amx = native.has_amx and dtype == torch.bfloat16
    header, step = ("amx.h", 16) if on_amx else ("tile_body.h", 1)
    native = mutated_native_cpu(
        tmp_path, header, "for (long s = 0; s < steps;", f"for (long s = 0; s + {step} < steps;"
    )
    monkeypatch.setattr(cpu, "native_cpu", lambda: native)
    weight, x = draw(64, 576, dtype=dtype), draw(3, 576, dtype=dtype)
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact(
            linear(x, pack_linear(weight)), F.linear(x, weight), x.double() @ weight.double().T
        )
