"""The GPU's kernels behind their fronts, at real sizes, against float64 on fresh random inputs."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.activation import silu_and_mul
from weft.kernels.ops.attention import gpu as gpu_attention
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.library_cudnn import is_faster
from weft.kernels.ops.attention.library_flash import prompt_rows, supports
from weft.kernels.ops.attention.spec import OwnKv
from weft.kernels.ops.greedy import greedy_rows, greedy_rows_reference
from weft.kernels.ops.linear import gate_up_silu, linear, normed_linear
from weft.kernels.ops.linear import gpu as gpu_linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.norm import add_rms_norm, rms_norm
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    eager_attention,
    exact_attention,
    hide_before_window,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("cuda")

CUDA = "cuda"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-5
GEOMETRIES = [
    Geometry(32, 8, 128, 16),
    Geometry(9, 3, 64, 16),
    Geometry(16, 8, 128, 32),
    Geometry(4, 4, 80, 16),
    Geometry(32, 4, 96, 64),
    Geometry(4, 1, 256, 16),
]


def randn(*shape: int, dtype: torch.dtype, factor: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=CUDA) * factor).to(dtype)


def exact_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 4096), (7, 576), (300, 1000), (64, 8192)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x, residual = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype)
    weight, total = randn(width, dtype=dtype), x + residual
    plain = rms_norm(x, weight, EPS)
    assert_as_exact(plain, F.rms_norm(x, (width,), weight, EPS), exact_norm(x, weight))
    added, stream = add_rms_norm(x, residual, weight, EPS)
    assert stream is residual
    assert torch.equal(stream, total)
    assert_as_exact(added, F.rms_norm(total, (width,), weight, EPS), exact_norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 14336), (65, 3000), (300, 17)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x = randn(rows, 2 * width, dtype=dtype, factor=8)
    gate, up = x.chunk(2, dim=-1)
    assert_as_exact(silu_and_mul(x), F.silu(gate) * up, F.silu(gate.double()) * up.double())


def test_extreme_gates() -> None:
    gates = torch.tensor([-1e4, -104.0, -88.0, -30.0, 0.0, 30.0, 88.0, 1e4, 1e30], device=CUDA)
    out = silu_and_mul(torch.stack((gates, torch.ones_like(gates)), dim=1))
    assert torch.allclose(out[:, 0].double(), F.silu(gates.double()), rtol=1e-5, atol=1e-35)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("rows", [1, 333])
def test_rope_and_cache(rows: int, geometry: Geometry, normed: bool, dtype: torch.dtype) -> None:
    fresh_seed()
    heads, kv_heads, dim, page_size = geometry
    layers, layer, pages = 3, 1, 40
    qkv = randn(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
    q_norm, k_norm = (randn(dim, dtype=dtype) if normed else None for _ in range(2))
    positions = torch.randint(0, 500, (rows,), device=CUDA)
    cos_sin = torch.randn(500, dim, device=CUDA)
    slots = torch.randperm(pages * page_size, device=CUDA)[:rows]
    shape = (pages, kv_heads, layers, 2, page_size, dim)
    pool = torch.full(shape, float("nan"), dtype=dtype, device=CUDA)
    eager_pool, exact_pool = pool.clone(), pool.double()
    eager = rope_and_cache_reference(
        qkv, positions, cos_sin, eager_pool, layer, slots, heads, kv_heads, q_norm, k_norm, EPS
    )
    wide_norms = [None if norm is None else norm.double() for norm in (q_norm, k_norm)]
    exact = rope_and_cache_reference(
        qkv.double(), positions, cos_sin.double(), exact_pool, layer, slots, heads, kv_heads,
        *wide_norms, EPS,
    )  # fmt: skip
    q = rope_and_cache(
        qkv, positions, cos_sin, pool, layer, slots, heads, kv_heads, q_norm, k_norm, EPS
    )
    assert_as_exact(q, eager, exact)
    written = ~exact_pool.isnan()
    assert torch.equal(written, ~pool.isnan()), "wrong places were written"
    assert_as_exact(pool[written], eager_pool[written], exact_pool[written])
    v = qkv.view(rows, -1, dim)[:, heads + kv_heads :]
    assert torch.equal(pool[slots // page_size, :, layer, 1, slots % page_size], v)


def attend(case: Case, window: int | None = None, *, is_fixed: bool = False) -> torch.Tensor:
    """The front, in memory that held NaN before."""
    poison = torch.full_like(case.q, float("nan"))
    del poison
    return in_parts(paged_attention)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        window=window,
        is_fixed=is_fixed,
    )


def attend_with_own(case: Case, window: int | None = None) -> torch.Tensor:
    """The GPU's form with the step's own K and V beside the pool."""
    return in_parts(gpu_attention.paged_attention)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        own=OwnKv(*case.own_kv()),
        window=window,
    )


def check(case: Case, factor: float = 2.0, window: int | None = None) -> None:
    eager, exact = eager_attention(case, window=window), exact_attention(case, window=window)
    assert_as_exact(attend(case, window), eager, exact, factor)
    if case.max_q_len > 1:
        out = attend_with_own(hide_own_pages(case), window)
        assert_as_exact(out, eager, exact, factor)
    if window is not None and case.q.dtype != torch.float32:
        assert_as_exact(attend(case, window, is_fixed=True), eager, exact, factor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_of_a_ragged_mix(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    lengths = [(1, 1), (1, 1300), (137, 137), (5, 64), (0, 12), (1, 65), (140, 700), (2, 2)]
    random.shuffle(lengths)
    check(make_case(geometry, lengths, dtype, CUDA))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_of_decode_batches(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    for count in (1, 33, 200):
        lengths = [(1, random.randint(1, 1500)) for _ in range(count)]
        check(make_case(geometry, lengths, dtype, CUDA))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_attention_of_few_rows_each(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    for count, most in ((1, 8), (9, 4), (64, 2), (64, 6)):
        q_lens = [random.randint(1, most) for _ in range(count)]
        lengths = [(n, n + random.choice((0, 3, 63, 700))) for n in q_lens]
        # Torch sums few rows of float32 in another order, at times more exactly: 2.8 times at most
        # in some hundred cases on an H200, 1.3 times on average.
        factor = 3.0 if dtype == torch.float32 else 2.0
        check(make_case(geometry, [*lengths, (0, 0)], dtype, CUDA), factor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_fewer_rows_than_there_may_be(dtype: torch.dtype) -> None:
    """A graph knows a bound only; a request may bring one row all the same."""
    fresh_seed()
    for q_lens in ([1], [3], [1, 1], [2, 1, 4]):
        case = make_case(GEOMETRIES[1], [(n, n + 90) for n in q_lens], dtype, CUDA)
        poison = torch.full_like(case.q, float("nan"))
        del poison
        own = OwnKv(*case.own_kv()) if dtype == torch.float32 else None
        lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
        for bound in (6, 16, 64):
            bounds = (*lengths, bound, 4096)
            out = in_parts(gpu_attention.paged_attention)(
                case.q, case.pool, LAYER, *bounds, own=own
            )
            assert_as_exact(out, eager_attention(case), exact_attention(case))


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_long_contexts(dtype: torch.dtype) -> None:
    fresh_seed()
    check(make_case(Geometry(8, 2, 128, 16), [(1, 30_001), (1, 512)], dtype, CUDA))
    check(make_case(Geometry(8, 2, 128, 16), [(300, 9000), (1, 4097)], dtype, CUDA))
    check(make_case(Geometry(8, 2, 128, 16), [(2049, 3001)], dtype, CUDA))


@pytest.mark.parametrize("lengths", [[(3600, 3600)], [(2500, 2500)] * 2, [(3600, 3600), (9, 9)]])
def test_attention_of_long_cold_prompts(lengths: list[tuple[int, int]]) -> None:
    fresh_seed()
    case = make_case(Geometry(32, 8, 128, 16), lengths, torch.bfloat16, CUDA)
    is_uniform = len({q_len for q_len, _ in lengths}) == 1
    assert is_faster(case.q, 8, len(lengths), case.max_q_len, case.max_kv_len) == is_uniform
    check(case)


@pytest.mark.needs("fa3")
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_flash_attention_of_prompts_with_nothing_before_them(geometry: Geometry) -> None:
    """Beside decodes, padding and requests without rows; only bounds are known of lengths. What
    padding gets is finite, whatever its memory had.
    """
    fresh_seed()
    prompts = [(n, n) for n in (2, 1500, random.randint(100, 900), 64, 129)]
    for lengths in (prompts, [*prompts, (1, 1), (1, 1300), (0, 12), (1, 65)], [(2100, 2100)]):
        random.shuffle(lengths)
        case = make_case(geometry, lengths, torch.bfloat16, CUDA)
        assert supports(case.q.dtype, geometry.dim, len(case.q)) == (len(case.q) >= 2048)
        pool, (k, v) = hide_own_pages(case).pool, case.own_kv()
        padding = random.choice((1, 77))
        q, k, v = (torch.cat([x, torch.randn_like(x[:padding])]) for x in (case.q, k, v))
        poison = torch.full_like(q, float("nan"))
        del poison
        bounds = (case.scale, len(q), 1 << 15)
        lens = (case.page_table, case.cu_q_lens, case.kv_lens)
        own = OwnKv(k, v, prompt_rows(case.cu_q_lens, len(q)))
        out = in_parts(gpu_attention.paged_attention)(q, pool, LAYER, *lens, *bounds, own=own)
        found, rest = out.split([len(case.q), padding])
        assert_as_exact(found, eager_attention(case), exact_attention(case))
        assert rest.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "geometry"), [(20, GEOMETRIES[3]), (1000, GEOMETRIES[0])])
def test_attention_within_windows(window: int, geometry: Geometry, dtype: torch.dtype) -> None:
    """Shorter and longer than a tile, a split and a chunk."""
    fresh_seed()
    mix = [(1, 1), (1, 1300), (137, 137), (5, 64), (0, 12), (300, 2500), (1, 65), (2, 2)]
    few = [(random.randint(1, 6), random.randint(6, 3000)) for _ in range(20)]
    one = [(1, random.randint(1, 3000)) for _ in range(50)]
    for lengths in (mix, few, one, [(1, 30_001), (1, 512)], [(3, 9000)], [(700, 700)]):
        case = make_case(geometry, lengths, dtype, CUDA)
        hide_before_window(case, window)
        check(case, window=window)


@pytest.mark.parametrize("window", [1000, 3599, 3600])
def test_attention_of_long_cold_prompts_within_windows(window: int) -> None:
    """Only the last may go to cuDNN, which knows no window."""
    fresh_seed()
    check(make_case(Geometry(32, 8, 128, 16), [(3600, 3600)], torch.bfloat16, CUDA), window=window)


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (0, 9)], [(1, 1)], [(2, 2)]])
def test_attention_of_nothing_or_hardly_anything(lengths: list[tuple[int, int]]) -> None:
    case = make_case(Geometry(4, 2, 64, 16), lengths, torch.bfloat16, CUDA)
    assert attend(case).shape == (len(case.q), 256)
    if len(case.q):
        check(case)


def test_attention_of_a_request_without_context_is_zero() -> None:
    case = make_case(Geometry(4, 2, 64, 16), [(1, 70), (1, 0)], torch.bfloat16, CUDA)
    out = attend(case)
    assert not out[1].any()
    torch.testing.assert_close(out.double(), exact_attention(case), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_with_large_scores(dtype: torch.dtype) -> None:
    fresh_seed()
    case = make_case(Geometry(4, 2, 64, 16), [(3, 200), (1, 700)], dtype, CUDA)
    case.q.mul_(60)
    # Scores of some hundreds: their own rounding dominates, and varies with the order of sums.
    check(case, factor=4)


def test_attention_and_cache_write_beyond_2_to_the_31_elements() -> None:
    fresh_seed()
    geometry, dtype = Geometry(16, 8, 128, 16), torch.bfloat16
    case = make_case(geometry, [(1, 500), (90, 300)], dtype, CUDA)
    page_elements = case.pool[0].numel()
    shift = (1 << 31) // page_elements + 1
    pool = torch.empty((shift + len(case.pool), *case.pool.shape[1:]), dtype=dtype, device=CUDA)
    pool[shift:] = case.pool
    moved = case._replace(pool=pool, page_table=case.page_table + shift)
    assert torch.equal(attend(moved), attend(case))
    rows = 20
    qkv = randn(rows, 32 * 128, dtype=dtype)
    positions = torch.arange(rows, device=CUDA)
    cos_sin = torch.randn(rows, 128, device=CUDA)
    slots = (shift + 3) * 16 + torch.arange(rows, device=CUDA)
    rope_and_cache(qkv, positions, cos_sin, pool, 0, slots, 16, 8)
    v = qkv.view(rows, 32, 128)[:, 24:]
    assert torch.equal(pool[slots // 16, :, 0, 1, slots % 16], v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [
        (0, 64, 64),
        (1, 6144, 4096),
        (1, 26, 1000),
        (5, 520, 1000),
        (16, 4096, 14336),
        (33, 520, 1000),
        (17, 960, 576),
        (64, 6144, 1024),
        (50, 2056, 1024),
        (64, 16384, 2048),
        (65, 960, 576),
    ],
)
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    fresh_seed()
    x, weight = randn(rows, k, dtype=dtype), randn(n, k, dtype=dtype, factor=k**-0.5)
    bias, residual = randn(n, dtype=dtype), randn(rows, n, dtype=dtype)
    product = x.double() @ weight.double().T
    exact = product + bias.double() + residual.double()
    before = residual.clone()
    out = linear(x, pack_linear(weight, bias), residual)
    assert_as_exact(out, F.linear(x, weight, bias) + residual, exact)
    assert torch.equal(residual, before)
    out = linear(x, pack_linear(weight), residual)
    assert_as_exact(out, F.linear(x, weight) + residual, product + residual.double())
    logits = linear(x, pack_linear(weight), out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_as_exact(logits, F.linear(x, weight).float(), product)
    if rows:
        # Never rounded to 16 bits on the way.
        assert (logits - product).abs().max() < 2e-5 * product.abs().max()
    both = pack_gate_up(weight, bias)
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    wide_gate, wide_up = (product + bias.double()).chunk(2, dim=-1)
    assert_as_exact(gate_up_silu(x, both), F.silu(gate) * up, F.silu(wide_gate) * wide_up)


@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 960, 576), (2, 3072, 576), (1, 3072, 1000), (3, 960, 576)]
)
def test_products_take_the_norm_before(rows: int, n: int, k: int) -> None:
    """In one launch, and a third row in two; adding to a stream, of which a copy is left."""
    fresh_seed()
    x, weight = (randn(*shape, dtype=torch.bfloat16) for shape in ((rows, k), (n, k)))
    x *= 10.0 ** torch.randint(-2, 3, (rows, 1), device=CUDA)
    gain, w, gated = randn(k, dtype=torch.bfloat16), pack_linear(weight), pack_gate_up(weight)
    assert gpu_linear.supports_norm(rows, w) == (rows < 3)
    wide = x.double()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = (wide * scale * gain.double()) @ weight.double().T
    eager = F.linear(F.rms_norm(x, (k,), gain, 1e-5), weight)
    assert_as_exact(normed_linear(x, gain, 1e-5, w), eager, exact)
    logits = normed_linear(x, gain, 1e-5, w, torch.float32)
    assert logits.dtype == torch.float32
    assert_as_exact(logits, eager.float(), exact)
    (gate, up), (exact_gate, exact_up) = eager.chunk(2, -1), exact.chunk(2, -1)
    out = normed_linear(x, gain, 1e-5, gated)
    assert_as_exact(out, F.silu(gate) * up, F.silu(exact_gate) * exact_up)
    if rows > 2:
        return
    stream = randn(rows, n, dtype=torch.bfloat16)
    taps = torch.zeros(rows, 2 * n, dtype=x.dtype, device=CUDA)
    eager, exact = stream + F.linear(x, weight), stream.double() + wide @ weight.double().T
    gpu_linear.add_product(stream, x, w, tap=taps[:, n:])
    assert_as_exact(stream, eager, exact)
    assert torch.equal(taps[:, n:], stream)
    assert not taps[:, :n].any()


def test_linear_refuses_what_does_not_fit() -> None:
    weight = pack_linear(randn(64, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="does not fit"):
        linear(randn(2, 16, dtype=torch.bfloat16), weight)
    with pytest.raises(ValueError, match="does not fit"):
        linear(randn(2, 32, dtype=torch.float16), weight)
    x = randn(2, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="residual"):
        linear(x, weight, randn(1, 64, dtype=torch.bfloat16))


def test_greedy_rows() -> None:
    fresh_seed()
    logits = torch.randn(40, 128_256, device=CUDA)
    logits[0, [70, 100_000]] = 9.0
    logits[1] = torch.finfo(torch.float32).min
    logits[2, 128_255] = 9.0
    for row, bad in enumerate((float("nan"), float("inf"), float("-inf")), 3):
        logits[row, 128_000] = bad
    tokens = greedy_rows(logits)
    assert tokens[:6].tolist() == [70, 0, 128_255, -1, -1, -1]
    assert torch.equal(tokens, greedy_rows_reference(logits))
    assert torch.equal(tokens[6:], logits[6:].argmax(dim=1))
    assert greedy_rows(logits[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (
            "decode",
            ("begin + length, ", "begin + length - TILE, "),
        ),
        ("extend", ("range(full, common, TILE)", "range(TILE, common, TILE)")),
        ("extend", ("range(full, own_begin, TILE)", "range(TILE, own_begin, TILE)")),
    ],
)
def test_the_checks_see_a_dropped_tile(name: str, change: tuple[str, str], tmp_path: Path) -> None:
    is_decode, is_own = name == "decode", "begin, TILE" in change[0]
    lengths = [(1, 4000), (1, 3000)] if is_decode else [(300, 500), (200, 200)]
    case = make_case(Geometry(8, 2, 128, 16), lengths, torch.bfloat16, CUDA)
    out = torch.full_like(case.q, float("nan")).flatten(1)
    own = case.own_kv() if is_own else None
    lengths_and_scale = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    for applied in (None, change):
        with kernel_module(f"attention.triton_{name}", tmp_path, applied) as module:
            attention = in_parts(partial(getattr(module, f"{name}_attention"), out))
            options: dict[str, Any] = {"own": OwnKv(*own) if own else None}
            if is_decode:
                options = {"is_uniform": True}
            bounds = case.max_q_len, case.max_kv_len
            attention(case.q, case.pool, LAYER, *lengths_and_scale, *bounds, **options)
        if applied is None:
            assert_as_exact(out, eager_attention(case), exact_attention(case))
    with pytest.raises(AssertionError):
        assert_as_exact(out, eager_attention(case), exact_attention(case))
