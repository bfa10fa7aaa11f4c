"""Products with weights in groups of 4 and 8 bits against float64 on fresh random inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear, weight_rows
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.moe import moe, route
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.int_groups import (
    IntGroups,
    mxfp4_groups,
    nvfp4_groups,
    pack_int_groups,
    quantise_groups,
)
from weft.testing.kernels.group_cases import draw_nvfp4, rows_as_multiplied
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)
from weft.testing.kernels.lora_cases import draw_slots, make_lora, segments_of

SHAPES = [(5, 7, 32), (33, 200, 64), (100, 577, 32), (64, 512, 128), (70, 700, 10_000)]
ROWS = [0, 1, 2, 5, 13, 33, 70]


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    return str(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    fresh_seed()


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def draw_matrix(
    n: int, k: int, group: int, bits: Literal[4, 8] = 4, *, offsets: bool = True, half: bool = True
) -> tuple[IntGroups, torch.Tensor]:
    """A matrix that uses all numbers, with groups of very different size; and its floats."""
    if bits == 8:
        numbers = torch.randint(-128, 128, (n, k))
    else:
        numbers = torch.randint(0, 16, (n, k)) - (0 if offsets else 8)
    groups = -(-k // group)
    scales = torch.rand(n, groups).add(0.1) * 10.0 ** torch.randint(-2, 1, (n, groups)) / k**0.5
    parts = [scales, torch.randn(n, groups) * scales]
    parts = [part.half().float() if half else part for part in parts]
    of_column = torch.arange(k) // group
    wide = numbers * parts[0][:, of_column] + (parts[1][:, of_column] if offsets else 0)
    matrix = pack_int_groups(numbers, parts[0], parts[1] if offsets else None, group, bits)
    return matrix, wide


def as_multiplied(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights that rows of this dtype are multiplied by: on AMX those of bfloat16 are rounded
    to nearest, ties away from zero.
    """
    native = cpu.native_cpu()
    if native is None or not native.has_amx or dtype != torch.bfloat16:
        return wide
    return (wide.view(torch.int32) + 0x8000 & -0x10000).view(torch.float32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k", "group"), SHAPES)
def test_products_are_those_of_the_dequantised_weights(
    n: int, k: int, group: int, dtype: torch.dtype
) -> None:
    kinds: list[tuple[Literal[4, 8], bool, bool]] = [
        (4, True, True),
        (4, False, False),
        (8, True, False),
        (8, False, True),
    ]
    for bits, offsets, half in kinds:
        matrix, wide = draw_matrix(n, k, group, bits, offsets=offsets, half=half)
        assert matrix.bits == bits
        assert torch.equal(matrix.dequantised(torch.float32), wide)
        assert (matrix.scales.dtype == torch.float16) == half
        bias = draw(n, dtype=dtype)
        packed = pack_linear(matrix, bias, dtype=dtype)
        assert torch.equal(weight_rows(packed, torch.arange(n)), wide.to(dtype))
        wide = as_multiplied(wide, dtype)
        for rows in ROWS:
            x, residual = draw(rows, k, dtype=dtype), draw(rows, n, dtype=dtype)
            rounded = rows_as_multiplied(x, matrix)
            exact = rounded.double() @ wide.double().T + bias.double() + residual.double()
            peer = (F.linear(rounded.float(), wide) + bias.float() + residual.float()).to(dtype)
            terms = x.double().norm(dim=1, keepdim=True) * wide.double().norm(dim=1)
            slack = 1e-6 * terms.max().item() if rows else 0.0
            if cpu.native_cpu() is None and dtype == torch.bfloat16:
                slack = 4e-3 * terms.max().item() if rows else 0.0  # Weights are rounded first.
            assert_as_exact(linear(x, packed, residual), peer, exact, slack=slack)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("exponents", [(110, 125), (60, 190)])
def test_products_with_mxfp4(exponents: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = 100, 32 * 18
    blocks = torch.randint(0, 256, (n, k // 32, 16), dtype=torch.uint8)
    scales = torch.randint(*exponents, (n, k // 32), dtype=torch.uint8)
    wide = mxfp4_by_the_book(blocks, scales)
    matrix = mxfp4_groups(blocks, scales)
    assert matrix.scales.dtype == (torch.float16 if exponents[1] < 130 else torch.float32)
    assert torch.equal(matrix.dequantised(torch.float32), wide.float())
    packed = pack_linear(matrix, dtype=dtype)
    assert torch.equal(weight_rows(packed, torch.arange(n)), wide.to(dtype))
    for rows in ROWS:
        x = draw(rows, k, dtype=dtype)
        exact, peer = x.double() @ wide.T, F.linear(x.float(), wide.float()).to(dtype)
        terms = x.double().norm(dim=1, keepdim=True) * wide.norm(dim=1)
        # The scales of a row differ by much, and so do the terms of a sum.
        error = (linear(x, packed).double() - exact).abs()
        assert (
            error
            <= 2 * (peer.double() - exact).abs()
            + (1e-6 if dtype == torch.float32 else 4e-3) * terms
        ).all()


def mxfp4_by_the_book(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Number by number, in float64: the MX specification, section 5.3.3."""
    return (e2m1_by_the_book(blocks) * 2.0 ** (scales[..., None].double() - 127)).flatten(1)


def e2m1_by_the_book(blocks: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(*blocks.shape[:2], 2 * blocks.shape[2], dtype=torch.float64)
    for place in range(wide.shape[2]):
        code = (blocks[..., place // 2] >> (4 * (place % 2))).int() & 15
        exponent, mantissa = code >> 1 & 3, (code & 1).double()
        size = torch.where(exponent > 0, 2.0 ** (exponent - 1) * (1 + mantissa / 2), mantissa / 2)
        wide[..., place] = torch.where(code > 7, -size, size)
    return wide


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales_of", ["all", "alike"])
def test_products_with_nvfp4(scales_of: str, dtype: torch.dtype) -> None:
    n, k = 100, 16 * 37
    data = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.randint(0, 127, (n, k // 16), dtype=torch.uint8)  # Every number that is not NaN.
    scales[: n // 2] |= 128
    if scales_of == "alike":
        scales = torch.randint(56, 72, (n, k // 16), dtype=torch.uint8)
    scales, factors = scales.view(torch.float8_e4m3fn), torch.rand(n) / 2**10 + 2.0**-20
    wide = e2m1_by_the_book(data.unflatten(1, (-1, 8))) * scales.double()[..., None]
    wide = wide.flatten(1) * factors.double()[:, None]
    matrix = nvfp4_groups(data, scales, factors)
    assert torch.equal(matrix.dequantised(torch.float32), wide.float())
    packed = pack_linear(matrix, dtype=dtype)
    assert torch.equal(weight_rows(packed, torch.arange(n)), wide.float().to(dtype))
    for rows in ROWS:
        x = draw(rows, k, dtype=dtype)
        rounded = rows_as_multiplied(x, matrix)
        error = (linear(x, packed).double() - rounded.double() @ wide.T).abs()
        terms = x.double().norm(dim=1, keepdim=True) * wide.norm(dim=1)
        assert (error <= (1e-6 if dtype == torch.float32 else 4e-3) * terms).all()


def test_nvfp4_takes_four_and_a_half_bits_a_weight() -> None:
    packed = pack_linear(draw_nvfp4(512, 2048), dtype=torch.bfloat16)
    form, factors = packed.form, 4 * 512
    parts = [getattr(form, name) for name in ("data", "scales")]
    assert sum(part.nbytes for part in parts) * 8 == 4.5 * 512 * 2048
    assert form.factors.nbytes == factors


def test_scales_of_nvfp4_that_are_no_numbers_are_refused() -> None:
    data, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2)
    scales[1, 1] = float("nan")
    with pytest.raises(ValueError, match="no number"):
        nvfp4_groups(data, scales.to(torch.float8_e4m3fn), torch.ones(4))
    with pytest.raises(ValueError, match="are no NVFP4"):
        nvfp4_groups(data, torch.ones(4, 1).to(torch.float8_e4m3fn), torch.ones(4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "offsets", "group"),
    [(4, True, 32), (4, False, 64), (4, False, 256), (8, True, 64), (8, False, 128)],
)
def test_a_row_does_not_depend_on_the_others(
    bits: Literal[4, 8], offsets: bool, group: int, dtype: torch.dtype
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    matrix, wide = draw_matrix(200, 713, group, bits, offsets=offsets)
    packed, x = pack_linear(matrix, dtype=dtype), draw(64, 713, dtype=dtype)
    whole = linear(x, packed, out_dtype=torch.float32)
    for rows in (1, 2, 3, 7, 12, 13, 25, 40):
        assert torch.equal(linear(x[:rows], packed, out_dtype=torch.float32), whole[:rows])
        assert torch.equal(linear(x[64 - rows :], packed, out_dtype=torch.float32), whole[-rows:])
    wide = as_multiplied(wide, dtype)
    # The sum in float32 may be a few roundings off.
    damaged = x.clone()
    damaged[5, 99], damaged[9, 600], damaged[20] = float("nan"), float("inf"), 0.0
    out, others = linear(damaged, packed, out_dtype=torch.float32), torch.ones(64).bool()
    others[[5, 9, 20]] = False
    assert torch.equal(out[others], whole[others])
    assert not torch.isfinite(out[[5, 9]]).any()
    assert not out[20].any()
    x = rows_as_multiplied(x, matrix)
    terms = x.double().abs() @ wide.double().abs().T
    assert ((whole - x.double() @ wide.double().T).abs() < 1e-5 * terms).all()


Kind = Literal["4 bits", "8 bits", "mxfp4", "nvfp4"]


def draw_kind(n: int, k: int, kind: Kind) -> tuple[IntGroups, torch.Tensor]:
    """A matrix in groups of 32, or of 16, and its floats."""
    if kind == "nvfp4":
        matrix = draw_nvfp4(n, k)
        return matrix, matrix.dequantised(torch.float32)
    if kind != "mxfp4":
        return draw_matrix(n, k, 32, 4 if kind == "4 bits" else 8)
    blocks = torch.randint(0, 256, (n, -(-k // 32), 16), dtype=torch.uint8)
    matrix = mxfp4_groups(blocks, torch.randint(118, 122, blocks.shape[:2], dtype=torch.uint8))
    return matrix, matrix.dequantised(torch.float32)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["4 bits", "8 bits", "mxfp4", "nvfp4"])
def test_experts(kind: Kind, dtype: torch.dtype) -> None:
    count, hidden, inner, top_k = 5, 96, 64, 2
    pairs = [(draw_kind(2 * inner, hidden, kind), draw_kind(hidden, inner, kind)) for _ in range(5)]
    packed = pack_experts([(up[0], down[0]) for up, down in pairs], count, None, dtype)
    x = draw(60, hidden, dtype=dtype)
    routing = route(torch.randn(60, count), top_k, renormalise=True)
    exact = torch.zeros(60, hidden, dtype=torch.float64)
    for row in range(60):
        for expert, share in zip(routing.ids[row], routing.weights[row], strict=True):
            w13, w2 = (one[1].double() for one in pairs[expert])
            gate, up = (w13 @ x[row].double()).chunk(2)
            exact[row] += share.double() * (w2 @ (F.silu(gate) * up))
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    whole = moe(x, routing, packed)
    assert (whole.double() - exact).norm() < limit * exact.norm()
    parts = zip(*(part.split(1) for part in (x, routing.ids, routing.weights)), strict=True)
    alone = torch.cat([moe(row, type(routing)(ids, shares), packed) for row, ids, shares in parts])
    if cpu.native_cpu() is not None:
        assert torch.equal(alone, whole)
    # Of all rows together, since the experts of one may all but cancel.
    assert (alone.double() - exact).norm() < limit * exact.norm()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_and_adapters(dtype: torch.dtype) -> None:
    hidden, inner = 96, 44
    (matrix, wide), x = draw_matrix(2 * inner, hidden, 32), draw(60, hidden, dtype=dtype)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    gate, up = (x.double() @ wide.double().T).chunk(2, dim=-1)
    error = gate_up_silu(x, pack_gate_up(matrix, dtype=dtype)).double() - F.silu(gate) * up
    assert error.norm() < limit * (F.silu(gate) * up).norm()
    case, slots = make_lora(hidden, 2 * inner, [0, 8, 5], dtype), draw_slots(60, 3)
    added = LoraAddition((case.packed().weights,), 0, segments_of(slots))
    out = linear(x, pack_linear(matrix, dtype=dtype), lora=added)
    expected = case.add(x.double() @ wide.double().T, x.double(), slots, 0)
    assert (out.double() - expected).norm() < limit * expected.norm()


def in_order(matrix: IntGroups, wide: torch.Tensor) -> tuple[IntGroups, torch.Tensor]:
    """The matrix whose columns are those of another one, drawn by lot; and its floats."""
    order = torch.randperm(wide.shape[1])
    unsorted = torch.full_like(wide, torch.nan)
    for place, column in enumerate(order.tolist()):
        unsorted[:, column] = wide[:, place]
    return replace(matrix, order=order.int()), unsorted


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_columns_in_another_order(bits: Literal[4, 8], dtype: torch.dtype) -> None:
    hidden, inner, count = 96, 44, 3
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    matrix, wide = in_order(*draw_matrix(2 * inner, hidden, 32, bits, offsets=bits == 4))
    assert torch.equal(matrix.dequantised(torch.float32), wide)
    packed, x = pack_linear(matrix, dtype=dtype), draw(60, hidden, dtype=dtype)
    assert torch.equal(weight_rows(packed, torch.arange(2 * inner)), wide.to(dtype))
    exact = x.double() @ wide.double().T
    for rows in (1, 2, 13, 60):
        error = linear(x[:rows], packed).double() - exact[:rows]
        assert error.norm() < limit * exact[:rows].norm()
    gate, up = exact.chunk(2, dim=-1)
    error = gate_up_silu(x, pack_gate_up(matrix, dtype=dtype)).double() - F.silu(gate) * up
    assert error.norm() < limit * (F.silu(gate) * up).norm()
    case, slots = make_lora(hidden, 2 * inner, [0, 8, 5], dtype), draw_slots(60, 3)
    added = LoraAddition((case.packed().weights,), 0, segments_of(slots))
    expected = case.add(exact, x.double(), slots, 0)
    error = linear(x, packed, lora=added).double() - expected
    assert error.norm() < limit * expected.norm()
    pairs = [
        tuple(
            in_order(*draw_matrix(n, k, 32, bits))
            for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        for _ in range(count)
    ]
    experts = pack_experts([(up[0], down[0]) for up, down in pairs], count, None, dtype)
    routing, exact = (
        route(torch.randn(60, count), 2, renormalise=True),
        torch.zeros_like(x).double(),
    )
    for row in range(60):
        for expert, share in zip(routing.ids[row], routing.weights[row], strict=True):
            w13, w2 = (one[1].double() for one in pairs[expert])
            gate, up = (w13 @ x[row].double()).chunk(2)
            exact[row] += share.double() * (w2 @ (F.silu(gate) * up))
    assert (moe(x, routing, experts).double() - exact).norm() < limit * exact.norm()


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_to_four_bits(dtype: torch.dtype) -> None:
    weight = (torch.randn(50, 300) * 10.0 ** torch.randint(-3, 3, (50, 1))).to(dtype)
    weight[7], weight[8] = 0, 0.75
    matrix, wide = quantise_groups(weight), weight.float()
    error = F.pad((matrix.dequantised(torch.float32) - wide).abs(), (0, 20)).unflatten(1, (-1, 32))
    grouped = F.pad(wide[None], (0, 20), mode="replicate")[0].unflatten(1, (-1, 32))
    spread = (grouped.amax(2) - grouped.amin(2))[..., None]
    # Half a step, and the rounding of scale and offset to float16.
    assert (error <= spread / 30 + 1e-3 * grouped.abs().amax(2, keepdim=True) + 1e-6).all()
    assert torch.equal(matrix.dequantised(torch.float32)[8], wide[8])
    for bad in (float("nan"), float("inf")):
        weight[3, 4] = bad
        with pytest.raises(ValueError, match="finite"):
            quantise_groups(weight)


def test_matrices_that_do_not_fit_are_refused() -> None:
    numbers, scales = torch.zeros(4, 96), torch.ones(4, 6)
    with pytest.raises(ValueError, match="groups of 16 are not supported"):
        pack_int_groups(numbers, scales, None, 16)
    with pytest.raises(ValueError, match="no matrix of 96 columns"):
        pack_int_groups(numbers, scales, None, 32)
    with pytest.raises(ValueError, match="not finite"):
        pack_int_groups(numbers, scales / 0, None, 32)


@pytest.mark.full
@pytest.mark.parametrize(
    ("header", "original", "replacement"),
    [
        ("grouped.h", "adds ? *to : (vf){0}", "(vf){0}"),
        ("linear.h", "w->bits == 4 ? from / 8 * PANEL", "w->bits == 4 ? from / 16 * PANEL"),
    ],
)
def test_the_check_sees_what_is_left_out(
    header: str, original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip("needs native operations")
    native = mutated_native_cpu(tmp_path, header, original, replacement)
    monkeypatch.setattr(cpu, "native_cpu", lambda: native)
    (matrix, wide), x = draw_matrix(64, 577, 32), draw(3, 577, dtype=torch.float32)
    out = linear(x, pack_linear(matrix, dtype=torch.float32))
    with pytest.raises(AssertionError, match="error"):
        assert_as_exact(out, F.linear(x, wide), x.double() @ wide.double().T)
