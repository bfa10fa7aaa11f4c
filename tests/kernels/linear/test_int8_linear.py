"""Products with int8 weights against float64 on fresh random inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear, weight_rows
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.moe import moe, route
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.quantised import Int8Channels, quantise_channels
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)
from weft.testing.kernels.lora_cases import draw_slots, make_lora, segments_of

SHAPES = [(1, 1), (5, 7), (16, 72), (33, 200), (100, 1537), (960, 577)]
ROWS = [0, 1, 2, 3, 4, 5, 13, 33, 70]


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    return str(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    fresh_seed()


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def draw_matrix(n: int, k: int) -> Int8Channels:
    """A matrix that uses all of int8, -128 too, and rows of very different size."""
    data = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    return Int8Channels(data, torch.rand(n).add(0.1) * 10.0 ** torch.randint(-3, 2, (n,)) / k**0.5)


def loose(dtype: torch.dtype, terms: torch.Tensor) -> float:
    """What rounding rows to 16 bits, or sums of float32, may be off where terms cancel."""
    eps = 2.0**-15 if dtype == torch.bfloat16 else torch.finfo(torch.float32).eps
    return eps * terms.abs().max().item() if terms.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_the_dequantised_weights(
    path: str, n: int, k: int, dtype: torch.dtype
) -> None:
    matrix, bias = draw_matrix(n, k), draw(n, dtype=dtype)
    plain, biased = pack_linear(matrix, dtype=dtype), pack_linear(matrix, bias, dtype=dtype)
    assert (plain.out_features, plain.in_features, plain.dtype) == (n, k, dtype)
    wide = matrix.dequantised(torch.float32)
    for rows in ROWS:
        x, residual = draw(rows, k, dtype=dtype), draw(rows, n, dtype=dtype)
        exact = x.double() @ wide.double().T
        peer = F.linear(x.float(), wide)
        terms = x.double().norm(dim=1, keepdim=True) * wide.double().norm(dim=1)
        slack = loose(dtype, terms)
        if path == "torch" and rows:
            # Without native code weights are rounded to the type of the rows.
            slack = torch.finfo(dtype).eps * terms.max().item()
        assert_as_exact(linear(x, plain), peer.to(dtype), exact, slack=slack)
        out = linear(x, biased, residual)
        peer = (peer + bias.float() + residual.float()).to(dtype)
        exact += bias.double()
        if path == "torch" and rows:
            # The sum with the bias is rounded too, and the residual may cancel most of it.
            slack += torch.finfo(dtype).eps * exact.abs().max().item()
        assert_as_exact(out, peer, exact + residual.double(), slack=slack)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "k"), [(1, 8), (17, 72), (200, 577)])
def test_a_gate_with_its_up_projection(path: str, inner: int, k: int, dtype: torch.dtype) -> None:
    matrix = draw_matrix(2 * inner, k)
    matrix = Int8Channels(matrix.data, torch.full((2 * inner,), 1 / (70 * k**0.5)))
    packed, wide = pack_gate_up(matrix, dtype=dtype), matrix.dequantised(torch.float32)
    for rows in ROWS:
        x = draw(rows, k, dtype=dtype)
        gate, up = (x.double() @ wide.double().T).chunk(2, dim=-1)
        peer_gate, peer_up = F.linear(x.float(), wide).chunk(2, dim=-1)
        out = gate_up_silu(x, packed)
        peer = (F.silu(peer_gate) * peer_up).to(dtype)
        # On some ways gate, up and silu are rounded before they are multiplied: half an eps each.
        slack = loose(dtype, torch.full((1,), 8.0))
        slack += 2 * torch.finfo(dtype).eps * max((gate * up).abs().flatten().tolist(), default=0)
        if path == "torch" and rows:
            # Weights are rounded, whose terms may cancel in the gate and in the up projection.
            of_gate, of_up = (x.double().abs() @ wide.double().abs().T).chunk(2, dim=-1)
            rounding = up.abs() * of_gate + F.silu(gate).abs() * of_up
            slack += 1.2 * torch.finfo(dtype).eps * rounding.max().item()
        assert_as_exact(out, peer, F.silu(gate) * up, slack=slack)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_are_those_of_the_matrix(n: int, k: int, dtype: torch.dtype) -> None:
    matrix, rows = draw_matrix(n, k), torch.randint(n, (2 * n + 1,))
    found = weight_rows(pack_linear(matrix, draw(n, dtype=dtype), dtype=dtype), rows)
    assert torch.equal(found, matrix.dequantised(dtype)[rows])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters_add_to_products(dtype: torch.dtype) -> None:
    n, k, ranks = 96, 200, [0, 8, 5, 24]
    matrix, case = draw_matrix(n, k), make_lora(k, n, ranks, dtype)
    packed, wide = pack_linear(matrix, dtype=dtype), matrix.dequantised(torch.float32)
    for rows in (1, 13, 70):
        slots, x = draw_slots(rows, len(ranks)), draw(rows, k, dtype=dtype)
        added = LoraAddition((case.packed().weights,), 0, segments_of(slots))
        out = linear(x, packed, lora=added)
        exact = case.add(x.double() @ wide.double().T, x.double(), slots, 0)
        peer = case.add(F.linear(x.float(), wide).to(dtype), x, slots, 0)
        slack = torch.finfo(dtype).eps * exact.abs().max().item()
        assert_as_exact(out, peer, exact, slack=slack)
        alone = [t for t, slot in enumerate(slots) if (0, slot) not in case.plain]
        assert torch.equal(out[alone], linear(x, packed)[alone])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    packed, x = pack_linear(draw_matrix(200, 713), dtype=dtype), draw(64, 713, dtype=dtype)
    whole = linear(x, packed)
    for rows in (1, 2, 3, 7, 12, 13, 25, 40):
        assert torch.equal(linear(x[:rows], packed), whole[:rows])
        assert torch.equal(linear(x[64 - rows :], packed), whole[64 - rows :])
    x[5, 99], x[9, 700], x[20] = float("nan"), float("inf"), 0.0
    out = linear(x, packed)
    assert not torch.isfinite(out[[5, 9]]).any()
    assert not out[20].any()
    others = [row for row in range(64) if row not in (5, 9, 20)]
    assert torch.equal(out[others], whole[others])


def test_a_large_number_does_not_drown_the_numbers_beside_it() -> None:
    """One activation of a block is 500 times larger than the others, and meets zeros."""
    matrix, x = draw_matrix(64, 512), draw(8, 512, dtype=torch.bfloat16)
    x[:, 130] *= 500
    matrix.data[:, 130] = 0
    out = linear(x, pack_linear(matrix, dtype=torch.bfloat16), out_dtype=torch.float32)
    exact = x.double() @ matrix.dequantised(torch.float32).double().T
    assert (out - exact).norm() < 1e-2 * exact.norm()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype) -> None:
    count, hidden, inner, top_k = 5, 72, 44, 2
    matrices = [
        (
            quantise_channels(torch.randn(2 * inner, hidden)),
            quantise_channels(torch.randn(hidden, inner)),
        )
        for _ in range(count)
    ]
    packed = pack_experts(matrices, count, None, dtype)
    x = draw(60, hidden, dtype=dtype)
    routing = route(torch.randn(60, count), top_k, renormalise=True)
    exact = torch.zeros(60, hidden, dtype=torch.float64)
    for row in range(60):
        for expert, share in zip(routing.ids[row], routing.weights[row], strict=True):
            w13, w2 = (m.dequantised(torch.float32).double() for m in matrices[expert])
            gate, up = (w13 @ x[row].double()).chunk(2)
            exact[row] += share.double() * (w2 @ (F.silu(gate) * up))
    # Of all rows together: the error of one varies by a factor of two.
    for size in (1, 7, 60):
        parts = zip(*(part.split(size) for part in (x, routing.ids, routing.weights)), strict=True)
        out = torch.cat(
            [moe(rows, type(routing)(ids, shares), packed) for rows, ids, shares in parts]
        )
        error = (out.double() - exact).norm() / exact.norm()
        assert error < (1e-6 if dtype == torch.float32 else 8e-3)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_keep_what_int8_can_tell_apart(dtype: torch.dtype) -> None:
    weight = torch.randn(50, 300) * 10.0 ** torch.randint(-6, 6, (50, 1))
    weight[7] = 0
    weight[8] = 1e-44
    weight = weight.to(dtype)
    matrix = quantise_channels(weight)
    assert matrix.data.abs().max() == 127
    error = (matrix.dequantised(torch.float32) - weight.float()).abs().amax(1)
    # Half a step of the row, and the rounding of float32; what is almost zero becomes zero.
    assert (error <= weight.float().abs().amax(1) / 127 * 0.5001 + 1e-38).all()
    narrow = quantise_channels(weight[:, :7])
    assert torch.equal(narrow.scales, weight[:, :7].float().abs().amax(1) / 127)
    for bad in (float("nan"), float("inf")):
        weight[3, 4] = bad
        with pytest.raises(ValueError, match="finite"):
            quantise_channels(weight)


def test_matrices_that_do_not_fit_are_refused() -> None:
    data = torch.zeros(4, 6, dtype=torch.int8)
    for scales in (torch.ones(6), torch.ones(4).double(), torch.ones(4, 1)):
        with pytest.raises(ValueError, match="no matrix of int8 channels"):
            Int8Channels(data, scales)
    with pytest.raises(ValueError, match=r"cannot have a weight of torch\.int8"):
        pack_linear(Int8Channels(data, torch.ones(4)))
    with pytest.raises(ValueError, match=r"cannot have a weight of torch\.int8"):
        pack_linear(data)


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "header", "original", "replacement"),
    [
        (torch.bfloat16, "quantised.h", "for (long s = begin; s < end; s++)",
         "for (long s = begin; s + 1 < end; s++)"),
        (torch.bfloat16, "quantised.h", "block == 0 ? (vf){0} : *to", "(vf){0}"),
        (torch.float32, "quantised.h", "for (long s = 0; s < pairs; s++)",
         "for (long s = 0; s + 1 < pairs; s++)"),
        (torch.float32, "linear.h", "if (from == 0)", "if (from >= 0)"),
    ],
)  # fmt: skip
def test_the_check_sees_what_is_left_out(
    dtype: torch.dtype,
    header: str,
    original: str,
    replacement: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual = cpu.native_cpu()
    if usual is None or (usual.has_amx and dtype == torch.bfloat16):
        pytest.skip("needs native operations, and for integers a CPU without AMX")
    native = mutated_native_cpu(tmp_path, header, original, replacement)
    monkeypatch.setattr(cpu, "native_cpu", lambda: native)
    matrix, x = draw_matrix(64, 577), draw(3, 577, dtype=dtype)
    wide = matrix.dequantised(torch.float32)
    packed: LinearWeight = pack_linear(matrix, dtype=dtype)
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact(
            linear(x, packed), F.linear(x.float(), wide).to(dtype), x.double() @ wide.double().T
        )
