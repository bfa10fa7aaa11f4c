"""Products of int8 weights with rows in int8, both rotated, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.draft_head.spec import DraftHeadWeight
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear, weight_rows
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.shared import cpu
from weft.kernels.shared.formats.rotated import (
    BLOCK,
    MOST_COLUMNS,
    RotatedChannels,
    multiplies_rotated,
    quantise_rotated,
    rotate,
)
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.lora_cases import draw_slots, make_lora, segments_of

SHAPES = [(1, 64), (100, 576), (33, 1536)]
ROWS = [0, 1, 2, 15, 16, 17, 33, 70]
BF16 = torch.bfloat16


@pytest.fixture(params=["native", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Without native operations weights become floats at load."""
    fresh_seed()
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    return str(request.param)


def rotated_exactly(x: torch.Tensor) -> torch.Tensor:
    """Blocks of columns times the Hadamard matrix by its definition, float64."""
    index = torch.arange(BLOCK)
    both = index[:, None] & index
    ones = sum(both >> bit & 1 for bit in range(6))
    blocks = x.double().unflatten(1, (-1, BLOCK))
    return (blocks @ (1.0 - 2.0 * (ones % 2)).double() / BLOCK**0.5).flatten(1)


def draw_matrix(n: int, k: int) -> RotatedChannels:
    return quantise_rotated(torch.randn(n, k) * 10.0 ** torch.randint(-2, 3, (n, 1)) / k**0.5)


def draw_rows(rows: int, k: int) -> torch.Tensor:
    """Of very different size, and in each some numbers that are much larger."""
    x = torch.randn(rows, k) * 10.0 ** torch.randint(-3, 4, (rows, 1))
    x[:, torch.randint(0, k, (3,))] *= 100
    return x.to(BF16)


def rounded_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated rows rounded to 255 numbers each, and the step of each."""
    turned = rotated_exactly(x)
    steps = turned.abs().amax(1, keepdim=True) / 127
    return (turned / steps.clamp_min(1e-300)).round() * steps, steps


def check_product(out: torch.Tensor, x: torch.Tensor, matrix: RotatedChannels) -> None:
    """float32 results are those of rounded rows, where the machine rounds them."""
    wide = matrix.data.double() * matrix.scales.double()[:, None]
    exact = x.double() @ rotated_exactly(wide).T
    if not multiplies_rotated(BF16, x.device, x.shape[1]):
        terms = x.double().norm(dim=1, keepdim=True) * wide.norm(dim=1)
        assert ((out.double() - exact).abs() <= 2.0**-7 * terms).all()
        return
    rounded, steps = rounded_rows(x)
    # Sums in float32 may take a number that is almost half a step to the other side.
    slack = 3 * steps * wide.abs().amax(1) + 1e-5 * rounded.norm(dim=1)[:, None] * wide.norm(dim=1)
    assert ((out.double() - rounded @ wide.T).abs() <= slack).all()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_those_of_rounded_rows(n: int, k: int) -> None:
    matrix, bias = draw_matrix(n, k), torch.randn(n).to(BF16)
    plain, biased = pack_linear(matrix, dtype=BF16), pack_linear(matrix, bias, dtype=BF16)
    for rows in ROWS:
        x, residual = draw_rows(rows, k), torch.randn(rows, n).to(BF16)
        out = linear(x, plain, out_dtype=torch.float32)
        check_product(out, x, matrix)
        added = linear(x, biased, residual, out_dtype=torch.float32)
        torch.testing.assert_close(
            added, out + bias.float() + residual.float(), rtol=2e-2, atol=0.1
        )


def test_a_row_does_not_depend_on_the_others() -> None:
    if cpu.native_cpu() is None:
        return
    packed, x = pack_linear(draw_matrix(200, 576), dtype=BF16), draw_rows(64, 576)
    whole = linear(x, packed)
    for rows in (1, 2, 3, 15, 16, 17, 31, 33, 40):
        assert torch.equal(linear(x[:rows], packed), whole[:rows])
        assert torch.equal(linear(x[64 - rows :], packed), whole[64 - rows :])
    x[5, 99], x[9, 500], x[20] = float("nan"), float("inf"), 0.0
    out = linear(x, packed)
    assert not torch.isfinite(out[[5, 9]]).any()
    assert not out[20].any()
    others = [row for row in range(64) if row not in (5, 9, 20)]
    assert torch.equal(out[others], whole[others])


@pytest.mark.parametrize("size", [1e-34, 1e-36, 1e-37])
def test_a_row_of_subnormal_results_does_not_depend_on_the_others(size: float) -> None:
    if cpu.native_cpu() is None:
        return
    packed = pack_linear(quantise_rotated(torch.randn(50, 128) / 100), dtype=BF16)
    x = (torch.randn(20, 128) * size).to(BF16)
    alone = [linear(row, packed, out_dtype=torch.float32) for row in x.split(1)]
    assert torch.equal(linear(x, packed, out_dtype=torch.float32), torch.cat(alone))


def test_experts_and_draft_heads_refuse_them() -> None:
    if not multiplies_rotated(BF16, torch.device("cpu"), 64):
        return
    with pytest.raises(ValueError, match=r"expert 0.*rotated"):
        pack_experts([(draw_matrix(128, 64), draw_matrix(64, 64))], 1, dtype=BF16)
    product, table = pack_linear(draw_matrix(64, 64), dtype=BF16), torch.zeros(64, 64)
    names = ("fc", "qkv", "kv", "o", "gate_up", "down", "lm_head")
    tables = ("input_norm", "hidden_norm", "post_norm", "norm", "embedding", "target_ids")
    parts: dict[str, Any] = dict.fromkeys(names, product) | dict.fromkeys(tables, table)
    with pytest.raises(ValueError, match="rotated"):
        DraftHeadWeight(**parts, cos_sin=table, num_heads=1, eps=1e-5)


def test_a_gate_with_its_up_projection() -> None:
    matrix = quantise_rotated(torch.randn(2 * 43, 192) / 14)
    packed, x = pack_gate_up(matrix, dtype=BF16), torch.randn(40, 192).to(BF16)
    wide = matrix.dequantised(torch.float32).double()
    gate, up = (x.double() @ wide.T).chunk(2, dim=-1)
    exact = F.silu(gate) * up
    for rows in (1, 20, 40):
        out = gate_up_silu(x[:rows], packed).double()
        assert (out - exact[:rows]).norm() < 0.05 * exact[:rows].norm()


def test_adapters_add_to_products() -> None:
    n, k, ranks = 96, 192, [0, 8, 5, 24]
    matrix, case = draw_matrix(n, k), make_lora(k, n, ranks, BF16)
    packed = pack_linear(matrix, dtype=BF16)
    for rows in (1, 13, 70):
        slots, x = draw_slots(rows, len(ranks)), torch.randn(rows, k).to(BF16)
        added = LoraAddition((case.packed().weights,), 0, segments_of(slots))
        out, base = linear(x, packed, lora=added), linear(x, packed, out_dtype=torch.float32)
        exact = case.add(base.double(), x.double(), slots, 0)
        assert (out.double() - exact).abs().max() <= 0.02 * exact.abs().max()
        alone = [t for t, slot in enumerate(slots) if (0, slot) not in case.plain]
        assert torch.equal(out[alone], linear(x, packed)[alone])


def test_shares_of_the_columns_add_up() -> None:
    matrix, x = quantise_rotated(torch.randn(50, 384)), torch.randn(20, 384).to(BF16)
    total = torch.zeros(20, 50)
    for own in (slice(0, 128), slice(128, 384)):
        share = matrix.columns(own)
        packed = pack_linear(share, dtype=BF16)
        out = linear(x[:, own].contiguous(), packed, out_dtype=torch.float32)
        check_product(out, x[:, own], share)
        total += out
    exact = x.double() @ matrix.dequantised(torch.float32).double().T
    assert (total - exact).norm() < 0.05 * exact.norm()
    with pytest.raises(ValueError, match="no blocks of 64"):
        matrix.columns(slice(0, 100))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_rows_are_those_of_the_matrix(n: int, k: int) -> None:
    matrix, rows = draw_matrix(n, k), torch.randint(n, (2 * n + 1,))
    found = weight_rows(pack_linear(matrix, dtype=BF16), rows)
    expected = matrix.dequantised(BF16)[rows].float()
    slack = 2.0**-7 * expected.abs() + 1e-5 * expected.abs().amax(1, keepdim=True)
    assert ((found.float() - expected).abs() <= slack).all()


def test_rotating_and_rounding() -> None:
    weight = torch.randn(50, 320) * 10.0 ** torch.randint(-6, 6, (50, 1))
    weight[7] = 0
    rotated, exact = rotate(weight), rotated_exactly(weight)
    assert ((rotated - exact).abs() <= 1e-5 * exact.abs().amax(1, keepdim=True)).all()
    matrix = quantise_rotated(weight)
    error = (matrix.dequantised(torch.float32) - weight).norm(dim=1)
    # Half a step a number at most.
    assert (error <= rotated.abs().amax(1) / 127 * 0.501 * 320**0.5).all()
    for bad in (float("nan"), float("inf")):
        weight[3, 4] = bad
        with pytest.raises(ValueError, match="finite"):
            quantise_rotated(weight)


def test_where_rows_are_rounded(path: str) -> None:
    device, native = torch.device("cpu"), cpu.native_cpu()
    takes_them = path == "native" and native is not None and native.takes_int8_rows
    assert multiplies_rotated(BF16, device, 576) == takes_them
    assert not multiplies_rotated(torch.float32, device, 576)
    assert not multiplies_rotated(BF16, torch.device("cuda"), 576)
    assert not any(multiplies_rotated(BF16, device, k) for k in (0, 100, MOST_COLUMNS + BLOCK))
    matrix, x = draw_matrix(9, 128), torch.randn(3, 128)
    out = linear(x, pack_linear(matrix, dtype=torch.float32))
    torch.testing.assert_close(out, x @ matrix.dequantised(torch.float32).T, rtol=1e-3, atol=1e-2)
