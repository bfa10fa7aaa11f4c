"""Products with FP8 weights, by Triton's interpreter, against float64 on the same numbers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.linear.triton_fp8_few_rows import FewRows, can_take_norm, spread_launch_config
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows
from weft.kernels.ops.linear.triton_fp8_tiles import TileLaunchConfig
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.lora.triton_rows import NormOfRows
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.quantised import FP8_GROUP, Fp8Matrix
from weft.testing.kernels.as_on_gpu import add_in_one_order, as_on_gpu
from weft.testing.kernels.fp8_cases import draw_matrix
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import make_lora, poison_new_memory, segments_of

pytestmark = pytest.mark.needs("triton-interpreter")


def test_rows_that_take_a_norm_are_whole_in_a_program() -> None:
    for k, rows in itertools.product(range(16, 2048, 16), (1, 2)):
        for is_gated, is_blocks in itertools.product((False, True), repeat=2):
            shape = spread_launch_config(3072, k, is_gated=is_gated, is_blocks=is_blocks)
            assert not can_take_norm(rows, k) or k <= shape.groups * FP8_GROUP


def empty(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=torch.float16)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


def exact(x: torch.Tensor, matrix: Fp8Matrix, given: FewRows, dtype: torch.dtype) -> torch.Tensor:
    """The product of the dequantised weight in another dtype."""
    x, weight = x.to(dtype), matrix.dequantised(torch.float32).to(dtype)
    if given.norm is not None:
        gain, eps = given.norm
        scale = torch.rsqrt((x * x).mean(dim=1, keepdim=True) + eps)
        x = x * scale * gain.to(dtype)
    out = F.linear(x, weight, None if given.bias is None else given.bias.to(dtype))
    if given.is_gated:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out if given.residual is None else out + given.residual.to(dtype)


@pytest.mark.parametrize("block_rows", [0, 4, 128])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("is_gated", [False, True])
def test_few_rows(rows: int, block_rows: int, is_gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    k = 300
    n = 2 * (256 if block_rows == 128 else 140) if is_gated else 140
    columns = n // 2 if is_gated else n
    matrix = draw_matrix(n, k, block_rows)
    x, bias = draw(rows, k), draw(n)
    residual = None if is_gated else draw(rows, columns)
    given, out = FewRows(bias, residual, is_gated), empty(rows, columns)
    with kernel_module("linear.triton_fp8_few_rows", tmp_path) as module:
        module.few_rows(x, matrix, out, given, module.SpreadLaunchConfig(4, 2, 1))
    expected = exact(x, matrix, given, torch.float64)
    assert_as_exact(out, exact(x, matrix, given, torch.float32).half(), expected)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("block_rows", [0, 64])
def test_a_norm_and_a_tap_are_taken_along(rows: int, block_rows: int, tmp_path: Path) -> None:
    fresh_seed()
    k, columns = 330, 70
    matrix, x, stream = draw_matrix(columns, k, block_rows), draw(rows, k), draw(rows, columns)
    given = FewRows(None, stream.clone(), norm=NormOfRows(1 + draw(k) / 8, 1e-5))
    tap = empty(rows, 2 * columns)
    with kernel_module("linear.triton_fp8_few_rows", tmp_path) as module:
        module.few_rows(x, matrix, stream, given._replace(residual=stream, tap=tap[:, :columns]))
    expected = exact(x, matrix, given, torch.float64)
    assert_as_exact(stream, exact(x, matrix, given, torch.float32).half(), expected)
    assert torch.equal(tap[:, :columns], stream)
    assert tap[:, columns:].isnan().all()


@pytest.mark.parametrize("has_groups", [False, True])
def test_rows_are_divided_by_their_scales(has_groups: bool, tmp_path: Path) -> None:
    """Numbers that FP8 has: the interpreter rounds others wrongly."""
    fresh_seed()
    k = 330
    data = torch.randn(3, k).mul_(20).to(FP8).float()
    data[:, ::FP8_GROUP] = 448  # Of each group.
    data[1] = 0
    x = (data * torch.tensor([[2.0**-12], [1.0], [0.25]])).half()
    with kernel_module("linear.triton_fp8_rows", tmp_path) as module:
        found = module.quantise_rows(x, has_groups=has_groups)
    assert found.rows == 3
    assert torch.equal(found.data[:3].float(), data)
    assert torch.equal(found.data[:3].float() * _wide_scales(found, k), x.float())


@pytest.mark.parametrize("has_groups", [False, True])
def test_rows_are_activated(has_groups: bool, tmp_path: Path) -> None:
    fresh_seed()
    k = 330
    x = draw(3, 2 * k)
    with kernel_module("linear.triton_fp8_rows", tmp_path) as module:
        found = module.quantise_rows(x, has_groups=has_groups, is_gated=True)
    gate, up = x.float().chunk(2, dim=1)
    values = F.silu(gate) * up
    parts = F.pad(values, (0, -k % FP8_GROUP)).view(3, -1, FP8_GROUP)
    largest = parts.abs().amax(dim=2).T if has_groups else values.abs().amax(dim=1)
    torch.testing.assert_close(found.scales[..., :3], largest / 448)
    wide = found.data[:3].float() * _wide_scales(found, k)
    # At worst the interpreter halves a number.
    assert ((wide - values).abs() <= 0.55 * values.abs() + largest.max() * 2**-14).all()


@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize("width", [72, 330])
def test_a_norm_rounds_its_rows(width: int, has_groups: bool, tmp_path: Path) -> None:
    fresh_seed()
    x, residual, gain = draw(3, width), draw(3, width), draw(width)
    tap, streams = draw(3, width + 8)[:, 8:], [residual.clone() for _ in range(2)]
    with kernel_module("norm.triton_rms", tmp_path) as module:
        plain, _ = module.add_rms_norm(x, streams[0], gain, 1e-5)
        normed, rounded = module.add_rounding_norm(
            x, streams[1], gain, 1e-5, tap=tap, has_groups=has_groups
        )
    assert torch.equal(normed, plain)
    assert torch.equal(streams[1], streams[0])
    assert torch.equal(tap, streams[0])
    with kernel_module("linear.triton_fp8_rows", tmp_path) as module:
        apart = module.quantise_rows(plain, has_groups=has_groups)
    assert rounded.rows == 3
    assert torch.equal(rounded.scales[..., :3], apart.scales[..., :3])
    assert torch.equal(rounded.data[:3].float(), apart.data[:3].float())


def _wide_scales(rows: Fp8Rows, k: int) -> torch.Tensor:
    if not rows.has_groups:
        return rows.scales[:, None]
    return rows.scales.T.repeat_interleave(FP8_GROUP, 1)[: rows.rows, :k]


@pytest.mark.parametrize("block_rows", [0, 128])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        TileLaunchConfig(16, 32, FP8_GROUP, 4, 2, True),
        TileLaunchConfig(32, 64, FP8_GROUP, 4, 2),
        TileLaunchConfig(16, 32, FP8_GROUP, 4, 2, True, splits=2),
        TileLaunchConfig(16, 64, FP8_GROUP, 4, 2, splits=4),  # More than there are tiles of K.
    ],
)
def test_tiles(shape: TileLaunchConfig, is_gated: bool, block_rows: int, tmp_path: Path) -> None:
    if is_gated and shape.splits > 1:
        shape = shape._replace(splits=1)
    fresh_seed()
    rows, k, columns = 37, 300, 256
    n = 2 * columns if is_gated else 140
    columns = columns if is_gated else n
    matrix = draw_matrix(n, k, block_rows)
    whole = 48 if block_rows else rows
    data = torch.full((whole, k), float("nan")).to(FP8)
    data[:rows] = torch.randn(rows, k).mul_(50).to(FP8)
    groups = -(-k // FP8_GROUP)
    scales = (0.5 + torch.rand(*((groups, whole) if block_rows else (whole,)))) / 50
    scales[..., rows:] = float("nan")
    given = FewRows(draw(n), None if is_gated else draw(rows, columns), is_gated)
    x, out = Fp8Rows(data, scales, rows), empty(rows, columns)
    with kernel_module("linear.triton_fp8_tiles", tmp_path) as module:
        module.multiply_fp8(
            x, matrix, out, given.bias, given.residual, is_gated=is_gated, launch=shape
        )
    wide = data[:rows].float() * _wide_scales(x, k)
    expected = exact(wide, matrix, given, torch.float64)
    assert_as_exact(out, exact(wide, matrix, given, torch.float32).half(), expected)


@pytest.mark.parametrize("block_rows", [0, 128])
def test_fixed_products_round_any_number_of_rows(
    block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that FP8 has: the interpreter rounds others wrongly."""
    fresh_seed()
    add_in_one_order(monkeypatch)
    poison_new_memory(monkeypatch)
    rows, k, n = 70, 300, 140
    data = torch.randn(rows, k).mul_(20).to(FP8).float()
    data[:, ::FP8_GROUP] = 448  # Of each group.
    x, residual = (data * 2.0 ** -torch.randint(6, 9, (rows, 1))).half(), draw(rows, n)
    matrix, bias = draw_matrix(n, k, block_rows), draw(n)
    w = LinearWeight(n, k, torch.float16, False, matrix, bias, is_fixed=True)
    with as_on_gpu():
        whole = fp8_linear.linear(x, w, residual)
        parts = [x[i : i + size] for i, size in ((0, 1), (69, 1), (5, 3), (37, 33))]
        plain = fp8_linear.linear(x, w)
        for i, part in zip((0, 69, 5, 37), parts, strict=True):
            found = fp8_linear.linear(part.clone(), w)
            assert torch.equal(found, plain[i : i + len(part)])
    given = FewRows(bias, residual)
    # The product becomes float16 before the residual is added.
    peer = exact(x, matrix, FewRows(bias), torch.float32).half() + residual
    assert_as_exact(whole, peer, exact(x, matrix, given, torch.float64))


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("block_rows", [0, 64])
def test_rows_of_fixed_products_are_the_same_bits(
    block_rows: int, is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of any adapters, beside rows of others or of none."""
    fresh_seed()
    add_in_one_order(monkeypatch)
    poison_new_memory(monkeypatch)
    rows, k, n = 40, 200, 256
    case = make_lora(k, n, [0, 8, 20], torch.float16)
    w = LinearWeight(
        n, k, torch.float16, is_gated, draw_matrix(n, k, block_rows), None, is_fixed=True
    )
    x, slots = draw(rows, k), torch.randint(3, (rows,)).tolist()

    def run(begin: int, end: int, *, is_adapted: bool = True) -> torch.Tensor:
        lora = None
        if is_adapted:
            lora = LoraAddition((case.weights,), 0, segments_of(slots[begin:end]))
        with as_on_gpu():
            if is_gated:
                return fp8_linear.gate_up_silu(x[begin:end].clone(), w, lora)
            return fp8_linear.linear(x[begin:end].clone(), w, lora=lora)

    whole, plain = run(0, rows), run(0, rows, is_adapted=False)
    base = [row for row, slot in enumerate(slots) if slot == 0]
    assert torch.equal(whole[base], plain[base])
    assert not torch.equal(whole, plain)
    for begin, end in ((0, 1), (3, 5), (7, 10), (20, rows)):
        assert torch.equal(run(begin, end), whole[begin:end])
        assert torch.equal(run(begin, end, is_adapted=False), plain[begin:end])
