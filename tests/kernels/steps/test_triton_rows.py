"""The GPU's row-wise kernels, by Triton's interpreter at small sizes, against float64."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.activation import activate
from weft.kernels.ops.activation.spec import Activation
from weft.kernels.ops.greedy import greedy_rows
from weft.kernels.ops.linear import triton_epilogue
from weft.kernels.ops.linear import triton_small as small_linear
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.testing.kernels.gpu_kernels import change_kernels, kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

EPS = 1e-5


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_fine", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 72), (3, 640)])
def test_norms(rows: int, width: int, dtype: torch.dtype, is_fine: bool, tmp_path: Path) -> None:
    """Weights of the rows' dtype, or in float32 whatever that is."""
    fresh_seed()
    x, residual = torch.randn(rows, width).to(dtype), torch.randn(rows, width).to(dtype)
    weight, total = torch.randn(width).to(torch.float32 if is_fine else dtype), x + residual
    wide = torch.full((rows, 3 * width), float("nan"), dtype=dtype)
    tap = wide[:, width : 2 * width]
    with kernel_module("norm.triton_rms", tmp_path) as module:
        plain = module.rms_norm(x, weight, EPS)
        added, stream = module.add_rms_norm(x, residual, weight, EPS, tap=tap)
    near = weight.to(dtype)
    assert_as_exact(plain, F.rms_norm(x, (width,), near, EPS), exact_norm(x, weight))
    assert stream is residual
    assert torch.equal(stream, total)
    assert torch.equal(tap, total)
    assert wide[:, :width].isnan().all()
    assert wide[:, 2 * width :].isnan().all()
    assert_as_exact(added, F.rms_norm(total, (width,), near, EPS), exact_norm(total, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (2, 2), (3, 2200)])
def test_activations(
    activation: Activation, is_gated: bool, rows: int, width: int, tmp_path: Path
) -> None:
    fresh_seed()
    x = 8 * torch.randn(rows, width)
    gate, up = x.double().chunk(2, dim=-1) if is_gated else (x.double(), 1.0)
    exact = {
        "silu": gate / (1 + (-gate).exp()),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "gelu_tanh": gate * (1 + ((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)).tanh()) / 2,
        "relu": gate.relu(),
        "relu2": gate.relu() ** 2,
    }[activation] * up
    eager = activate(x, activation, is_gated=is_gated)
    with kernel_module("activation.triton_activation", tmp_path) as module:
        out = module.activate(x, activation, is_gated=is_gated)
    # Of a few numbers all may be near 0 because a factor is, whose own rounding then decides.
    factors = (gate.abs() * abs(up)).max().item() if rows else 0.0
    slack = 4 * torch.finfo(torch.float32).eps * factors
    assert_as_exact(eager, exact.float(), exact, slack=slack)
    assert_as_exact(out, eager, exact, slack=slack)


@pytest.mark.parametrize(
    ("norms", "heads", "num_adjacent"),
    [("", 7, 0), ("q", 7, 0), ("k", 7, 0), ("qk", 7, 0), ("", 0, 0), ("qk", 7, 5), ("", 7, 12)],
)
def test_rope_and_cache(norms: str, heads: int, num_adjacent: int, tmp_path: Path) -> None:
    fresh_seed()
    rows, kv_heads, dim, page_size, layers, layer, pages = 5, 2, 24, 8, 3, 1, 4
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    q_norm, k_norm = (torch.rand(dim) + 0.5 if name in norms else None for name in "qk")
    positions = torch.randint(0, 50, (rows,))
    cos_sin = torch.randn(50, dim)
    slots = torch.randperm(pages * page_size)[:rows]
    pool = torch.full((pages, kv_heads, layers, 2, page_size, dim), float("nan"))

    def run(pool: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
        return rope_and_cache_reference(
            qkv.to(wide), positions, cos_sin.to(wide), pool, layer, slots, heads, kv_heads,
            q_norm, k_norm, EPS, num_adjacent=num_adjacent,
        )  # fmt: skip

    eager_pool, exact_pool = pool.clone(), pool.double()
    eager = run(eager_pool, torch.float32)
    exact = run(exact_pool, torch.float64)
    with kernel_module("rope.triton_rope", tmp_path) as module:
        rest = (layer, slots, heads, q_norm, k_norm, EPS)
        q = module.rope_and_cache(qkv, positions, cos_sin, pool, *rest, num_adjacent=num_adjacent)
    assert_as_exact(q, eager, exact)
    written = ~exact_pool.isnan()
    assert torch.equal(written, ~pool.isnan())
    assert_as_exact(pool[written], eager_pool[written], exact_pool[written])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (1, 26, 700),
        (2, 10, 4104),
        (2, 6, 2100),
        (3, 40, 512),
        (4, 6, 1024),
        (9, 40, 512),
        (16, 20, 72),
    ],
)
def test_small_linear(rows: int, n: int, k: int, gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    x, weight = torch.randn(rows, k).half(), torch.randn(n, k).half()
    bias, residual = torch.randn(n).half(), torch.randn(rows, n).half()
    exact = x.double() @ weight.double().T + bias.double()
    eager = F.linear(x, weight, bias)
    with kernel_module("linear.triton_small", tmp_path) as module:
        if gated:
            (gate, up), (exact_gate, exact_up) = eager.chunk(2, -1), exact.chunk(2, -1)
            out = module.small_linear(x, weight, bias, None, x.dtype, gated=True)
            assert_as_exact(out, F.silu(gate) * up, F.silu(exact_gate) * exact_up)
            added = torch.randn(rows, n)
            (gate, up), (exact_gate, exact_up) = (
                (product + added.to(product.dtype)).chunk(2, -1) for product in (eager, exact)
            )
            out = module.small_linear(x, weight, bias, added, x.dtype, gated=True)
            assert_as_exact(out, F.silu(gate) * up, F.silu(exact_gate) * exact_up)
            return
        out = module.small_linear(x, weight, bias, residual, x.dtype)
        assert_as_exact(out, eager + residual, exact + residual.double())
        out = module.small_linear(x, weight, None, None, torch.float32)
        product = exact - bias.double()
        assert_as_exact(out, F.linear(x.float(), weight.float()), product)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("slices", [1, 2, 8])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 26, 700), (3, 40, 512), (9, 40, 512), (16, 6, 72)]
)
def test_sliced_linear(rows: int, n: int, k: int, slices: int, gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    x, weight = torch.randn(rows, k).half(), torch.randn(n, k).half()
    bias, residual = torch.randn(n).half(), torch.randn(rows, n).half()
    exact = x.double() @ weight.double().T + bias.double() + residual.double()
    eager = F.linear(x, weight, bias) + residual
    if gated:
        (gate, up), (exact_gate, exact_up) = eager.chunk(2, -1), exact.chunk(2, -1)
        eager, exact = F.silu(gate) * up, F.silu(exact_gate) * exact_up
    out = torch.full_like(eager, float("nan"))
    with kernel_module("linear.triton_sliced", tmp_path) as module:
        shape = module.SlicedLaunchConfig(16, slices, tile=64)
        module.sliced_linear(x, weight, bias, residual, out, gated=gated, launch=shape)
    assert_as_exact(out, eager, exact)


def check_norm_before(module: ModuleType, rows: int, *, gated: bool) -> None:
    """A product that takes the norm, and adds to a stream and leaves a copy unless it is gated."""
    n, k = 26, 500
    x, weight, gain = torch.randn(rows, k).half(), torch.randn(n, k).half(), torch.rand(k).half()
    x *= torch.tensor([0.01, 1.0, 30.0])[torch.randint(3, (rows, 1))].half()
    norm = module.NormOfRows(gain, EPS)
    exact = exact_norm(x, gain) @ weight.double().T
    eager = F.linear(F.rms_norm(x, (k,), gain, EPS), weight)
    assert module.can_take_norm(rows, k)
    if gated:
        (gate, up), (exact_gate, exact_up) = eager.chunk(2, -1), exact.chunk(2, -1)
        out = module.small_linear(x, weight, None, None, x.dtype, gated=True, norm=norm)
        assert_as_exact(out, F.silu(gate) * up, F.silu(exact_gate) * exact_up)
        return
    stream, wide = torch.randn(rows, n).half(), torch.full((rows, 3 * n), float("nan")).half()
    exact, eager, tap = exact + stream.double(), eager + stream, wide[:, n : 2 * n]
    module.small_linear(x, weight, None, stream, x.dtype, norm=norm, out=stream, tap=tap)
    assert_as_exact(stream, eager, exact)
    assert torch.equal(tap, stream)
    assert wide[:, :n].isnan().all()
    assert wide[:, 2 * n :].isnan().all()


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_products_take_the_norm_before(rows: int, gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    with kernel_module("linear.triton_small", tmp_path) as module:
        check_norm_before(module, rows, gated=gated)


@pytest.mark.parametrize(
    "change",
    [
        ("scale = tl.where(row == number, found, scale)", "scale = tl.where(row == 0, found, 1)"),
        ("tl.load(gain + part, mask=part < K", "tl.load(gain + part, mask=part < 0"),
        ("up *= scale[None, :]", "up *= 1.5"),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_wrong_norm_before_is_noticed(change: tuple[str, str], tmp_path: Path) -> None:
    fresh_seed()
    is_noticed = False
    with kernel_module("linear.triton_small", tmp_path, change) as module:
        for gated in (False, True):
            try:
                check_norm_before(module, 2, gated=gated)
            except AssertionError:
                is_noticed = True
    assert is_noticed


@pytest.mark.parametrize(("rows", "k"), [(3, 64), (1, 4096)])
def test_a_norm_before_is_refused_where_it_is_not_taken(rows: int, k: int) -> None:
    x, weight = torch.randn(rows, k).half(), torch.randn(4, k).half()
    norm = small_linear.NormOfRows(torch.ones(k).half(), EPS)
    with pytest.raises(ValueError, match="take no norm"):
        small_linear.small_linear(x, weight, None, None, x.dtype, norm=norm)
    if rows > 2:
        with pytest.raises(ValueError, match="no second copy"):
            small_linear.small_linear(x, weight, None, None, x.dtype, tap=x.new_empty(rows, 4))


@pytest.mark.full
def test_a_slice_that_is_left_out_is_noticed(tmp_path: Path) -> None:
    fresh_seed()
    x, weight = torch.randn(9, 512).half(), torch.randn(40, 512).half()
    out = x.new_empty((9, 40))
    change = ("static_range(STEP, K, STEP)", "static_range(STEP, K - STEP, STEP)")
    with kernel_module("linear.triton_sliced", tmp_path, change) as module:
        shape = module.SlicedLaunchConfig(16, slices=2, tile=64)
        module.sliced_linear(x, weight, None, None, out, gated=False, launch=shape)
    with pytest.raises(AssertionError):
        assert_as_exact(out, F.linear(x, weight), x.double() @ weight.double().T)


def check_tiled(module: ModuleType, rows: int, n: int, k: int, *, gated: bool) -> None:
    """With a bias and without."""
    x, weight, bias = torch.randn(rows, k).half(), torch.randn(n, k).half(), torch.randn(n).half()
    for added in (None, bias):
        eager, exact = F.linear(x, weight, added), x.double() @ weight.double().T
        if added is not None:
            exact += added.double()
        if gated:
            (gate, up), (exact_gate, exact_up) = eager.chunk(2, -1), exact.chunk(2, -1)
            eager, exact = F.silu(gate) * up, F.silu(exact_gate) * exact_up
        assert_as_exact(module.tiled_linear(x, weight, added, gated=gated), eager, exact)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(17, 26, 64), (64, 40, 384), (33, 6, 1088), (1, 8192, 128)]
)
def test_tiled_linear(rows: int, n: int, k: int, gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    with kernel_module("linear.triton_tiled", tmp_path) as module:
        check_tiled(module, rows, n, k, gated=gated)


@pytest.mark.parametrize(
    ("change", "gated"),
    [
        (("range(0, K, TILE)", "range(0, K - TILE, TILE)"), False),
        (("tl.load(begin_up + start)", "tl.load(begin + start)"), True),
    ],
)
@pytest.mark.full
def test_a_wrong_tile_is_noticed(change: tuple[str, str], gated: bool, tmp_path: Path) -> None:
    fresh_seed()
    with (
        kernel_module("linear.triton_tiled", tmp_path, change) as module,
        pytest.raises(AssertionError),
    ):
        check_tiled(module, 40, 48, 256, gated=gated)


@pytest.mark.parametrize(
    ("change", "gated"),
    [
        (("tl.load(bias + columns + column", "tl.load(bias + column"), True),
        (("tl.load(bias + column,", "tl.load(bias + column + 1,"), True),
        (("of_rows(row < rows, IS_TURNED) &", "of_rows(row < 32, IS_TURNED) &"), False),
    ],
)
@pytest.mark.full
def test_a_wrong_end_of_products_is_noticed(
    change: tuple[str, str], gated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    change_kernels(monkeypatch, triton_epilogue, tmp_path, change)
    with (
        kernel_module("linear.triton_tiled", tmp_path) as module,
        pytest.raises(AssertionError),
    ):
        check_tiled(module, 40, 48, 256, gated=gated)


@pytest.mark.parametrize("size", [5000, 9000])
def test_greedy_rows(size: int, tmp_path: Path) -> None:
    """A vocabulary that one program takes whole, and one of several tiles."""
    fresh_seed()
    logits = torch.randn(9, size)
    logits[0, [70, 4500]] = 9.0  # The lower id of equals.
    logits[1] = torch.finfo(torch.float32).min
    logits[2, -1] = 9.0
    for row, bad in enumerate((float("nan"), float("inf"), float("-inf")), 3):
        logits[row, 4321] = bad
    wide = torch.full((9, size + 3), 99.0)
    wide[:, :size] = logits
    names = 7 + torch.randperm(size)
    with kernel_module("greedy.triton_rows", tmp_path) as module:
        tokens = module.greedy_rows(wide[:, :size])
        named = module.greedy_rows(wide[:, :size], names)
        assert module.greedy_rows(logits[:0]).shape == (0,)
    assert tokens[:3].tolist() == [70, 0, size - 1]
    assert tokens[3:6].tolist() == [-1, -1, -1]
    assert torch.equal(tokens[6:], logits[6:].argmax(dim=1))
    assert torch.equal(tokens, greedy_rows(wide[:, :size]))
    assert torch.equal(named, names[tokens.clamp(min=0)])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("norm.triton_rms", ("column < width", "column < width - 8")),
        ("activation.triton_activation", ("column < width", "column < width - 8")),
    ],
)
@pytest.mark.full
def test_the_checks_see_a_dropped_tail(name: str, change: tuple[str, str], tmp_path: Path) -> None:
    x = torch.randn(2, 72)
    with kernel_module(name, tmp_path, change) as module:
        if name == "norm.triton_rms":
            out, exact = module.rms_norm(x, torch.ones(72), EPS), exact_norm(x, torch.ones(72))
        else:
            gate, up = x.double().chunk(2, dim=-1)
            out, exact = module.activate(x, "silu", is_gated=True), F.silu(gate) * up
    with pytest.raises(AssertionError):
        assert_as_exact(out, exact.float(), exact)
