"""Attention, and the write of K and V, in a pool whose pages lie apart: as in a contiguous one."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels.ops import attention, rope
from weft.kernels.ops.attention import gpu as gpu_attention
from weft.kernels.ops.attention import triton_tiles
from weft.kernels.ops.pages.cpu import describe_pool
from weft.kernels.ops.rope import triton_rope as gpu_rope
from weft.kernels.shared import cpu
from weft.testing.kernels.attention_cases import LAYER, Case, Geometry, in_parts, make_case
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed, mutated_native_cpu
from weft.testing.kernels.tree_cases import Work, make_tree_case
from weft.testing.kernels.wide_pages import WidePages

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.needs("cc")]

MIXED = [(1, 1), (1, 129), (40, 77), (0, 3), (3, 50), (7, 7)]


@pytest.fixture(params=["native", "torch", "triton"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    kind: str = request.param
    return kind


def half(kernels: str) -> torch.dtype:
    """Of 16 bits: bfloat16 but for Triton's interpreter, which multiplies its bits."""
    return torch.float16 if kernels == "triton" else torch.bfloat16


def alike(kernels: str, case: Case, **options: Any) -> None:
    """Attention of a case gives the same bits from pages that lie apart, and writes to none."""
    wide = WidePages(case.pool)
    attend: Callable[..., torch.Tensor] = attention.paged_attention
    if kernels == "triton":
        attend = gpu_attention.paged_attention
    else:
        options.pop("own", None)
        options.pop("is_settled", None)
    found, expected = (
        in_parts(attend)(
            *(case.q, pool, LAYER, case.page_table, case.cu_q_lens, case.kv_lens),
            *(case.scale, case.max_q_len, case.max_kv_len),
            **options,
        )
        for pool in (wide.pool, case.pool)
    )
    assert not expected.isnan().any()
    assert torch.equal(found, expected)
    wide.check(case.pool)


@pytest.mark.parametrize("is_half", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"first_position": 1},
        {"window": 33},
        {"is_fixed": True},
        {"is_fixed": True, "window": 50},
        {"is_settled": True},
    ],
)
def test_decodes_beside_prompts(kernels: str, options: dict[str, Any], *, is_half: bool) -> None:
    fresh_seed()
    dtype = half(kernels) if is_half else torch.float32
    alike(kernels, make_case(Geometry(6, 2, 24, 16), MIXED, dtype), **options)


@pytest.mark.parametrize("lengths", [[(1, 300), (1, 33)], [(2, 70), (5, 90), (1, 12)]])
def test_requests_of_few_rows(kernels: str, lengths: list[tuple[int, int]]) -> None:
    fresh_seed()
    case = make_case(Geometry(4, 2, 16, 8), lengths, half(kernels))
    alike(kernels, case)
    alike(kernels, case, is_settled=True)


@pytest.mark.parametrize("window", [None, 40])
def test_prompts_behind_a_prefix_with_their_own_kv(kernels: str, window: int | None) -> None:
    fresh_seed()
    case = make_case(Geometry(2, 1, 16, 16), [(40, 110), (9, 9), (1, 20)], torch.float32)
    own = gpu_attention.OwnKv(*case.own_kv())
    alike(kernels, case, own=own, window=window)


@pytest.mark.parametrize("earlier", [0, 3])
def test_trees(kernels: str, earlier: int) -> None:
    fresh_seed()
    work = [Work(9, 60, True, earlier), Work(5, 40, True, earlier), Work(1, 30 + earlier)]
    tree = make_tree_case(Geometry(4, 2, 24, 16), work, half(kernels))
    first = {"first_position": 1, "earlier_rows": earlier} if earlier else {}
    alike(kernels, tree.case, ancestors=tree.ancestors, **first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_write(kernels: str, dtype: torch.dtype) -> None:
    fresh_seed()
    rows, heads, kv_heads, dim, page_size, layers = 19, 6, 2, 24, 8, 3
    pool = torch.randn(7, kv_heads, layers, 2, page_size, dim).to(dtype)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    positions, cos_sin = torch.randint(0, 50, (rows,)), torch.randn(50, dim)
    places = torch.randperm(7 * page_size)[:rows]
    norm, layer = 1 + torch.rand(dim).to(dtype), random.randrange(layers)

    def run(pool: torch.Tensor) -> torch.Tensor:
        common = (qkv, positions, cos_sin, pool, layer, places, heads)
        if kernels == "triton":
            return gpu_rope.rope_and_cache(*common, norm, norm, 1e-6)
        return rope.rope_and_cache(*common, kv_heads, norm, norm)

    wide, before = WidePages(pool), pool.clone()
    assert torch.equal(run(wide.pool), run(pool))
    assert not torch.equal(pool, before)
    wide.check(pool)


def next_to_each_other(stride: str, head: str, rest: str = "") -> tuple[str, str]:
    """A wrong kernel, for which pages lie side by side: rounding the stride drops the gap, which is
    smaller than what one head has of a page.
    """
    return f"* {stride}{rest}", f"* ({stride} // ({head}) * ({head})){rest}"


@pytest.mark.parametrize(
    ("lengths", "options"),
    [([(1, 20), (1, 50)], {}), ([(40, 50)], {}), ([(1, 20), (40, 50)], {"is_fixed": True})],
)
@pytest.mark.full
def test_kernels_that_take_pages_for_neighbours_are_noticed(
    lengths: list[tuple[int, int]],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    head = "2 * FORM.layers * FORM.page_size * FORM.dim"
    rest = " + in_page + position % FORM.page_size * FORM.dim"
    change = next_to_each_other("FORM.page_stride", head, rest)
    change_kernels(monkeypatch, triton_tiles, tmp_path, change)
    case = make_case(Geometry(6, 2, 24, 16), lengths, torch.float32)
    assert notices(lambda: alike("triton", case, **options))


@pytest.mark.full
def test_a_write_that_takes_pages_for_neighbours_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = next_to_each_other("PAGE_STRIDE", "2 * LAYERS * PAGE_SIZE * 2 * HALF")
    change_kernels(monkeypatch, gpu_rope, tmp_path, change)
    assert notices(lambda: test_rotation_and_write("triton", torch.float32))


@pytest.mark.full
def test_native_operations_that_take_pages_for_neighbours_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "(pool->kv_heads * pool->layers * 2 * pool->page_size * pool->dim)"
    mutated = mutated_native_cpu(
        tmp_path, "rows.h", "of_page = pool->page_stride", f"of_page = {lines}"
    )
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: mutated)
    case = make_case(Geometry(6, 2, 24, 16), [(1, 20), (40, 50)], torch.float32)
    assert notices(lambda: alike("native", case))
    assert notices(lambda: test_rotation_and_write("native", torch.float32))


def test_pages_must_be_contiguous() -> None:
    case = make_case(Geometry(2, 1, 16, 16), [(1, 5)], torch.float32)
    apart = torch.cat([case.pool, case.pool], dim=5)[..., :16]
    table = (case.page_table, case.cu_q_lens, case.kv_lens)
    with pytest.raises(ValueError, match="within a page"):
        in_parts(attention.paged_attention)(case.q, apart, LAYER, *table, case.scale, 1, 5)
    column = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="within a page"):
        rope.rope_and_cache(
            torch.zeros(1, 64), column, torch.zeros(9, 16), apart, LAYER, column, 2, 1
        )
    with pytest.raises(ValueError, match="within a page"):
        describe_pool(apart, apart.dtype)
