"""Paged attention against float64 on fresh random inputs, with NaN wherever it must not read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.shared import cpu
from weft.testing.kernels.attention_cases import in_parts
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)

LAYERS, LAYER = 2, 1

GEOMETRIES = [  # heads, kv_heads, dim, page_size
    (9, 3, 64, 16),
    (4, 4, 80, 8),
    (8, 1, 96, 32),
    (6, 2, 128, 16),
    (2, 2, 8, 8),
    (5, 1, 72, 16),
]


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


class Case(NamedTuple):
    """Arguments of one call and the plain K and V behind them."""

    q: torch.Tensor
    pool: torch.Tensor
    page_table: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    scale: float
    kv: list[torch.Tensor]
    """For each request [2, Hkv, kv_len, D]."""


def make_case(
    geometry: tuple[int, int, int, int],
    lengths: list[tuple[int, int]],
    dtype: torch.dtype,
) -> Case:
    """Requests of (q_len, kv_len) over scattered pages.

    All that no request may see is NaN: other layers, other pages, positions beyond kv_len. The
    table is -1 beyond the pages that are used.
    """
    heads, kv_heads, dim, page_size = geometry
    counts = [-(-kv_len // page_size) for _, kv_len in lengths]
    num_pages = sum(counts) + 3
    pool = torch.full((num_pages, kv_heads, LAYERS, 2, page_size, dim), float("nan"), dtype=dtype)
    free = torch.randperm(num_pages).tolist()
    page_table = torch.full((len(lengths), max(counts, default=0) + 2), -1, dtype=torch.int32)
    kv = []
    for request, ((_, kv_len), count) in enumerate(zip(lengths, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        page_table[request, :count] = torch.tensor(pages, dtype=torch.int32)
        plain = torch.randn(2, kv_heads, kv_len, dim).to(dtype)
        for i, page in enumerate(pages):
            part = plain[:, :, i * page_size : (i + 1) * page_size]
            pool[page, :, LAYER, :, : part.shape[2]] = part.transpose(0, 1)
        kv.append(plain)
    starts = torch.tensor([0, *(q_len for q_len, _ in lengths)]).cumsum(0).int()
    q = (2 * torch.randn(int(starts[-1]), heads, dim)).to(dtype)
    kv_lens = torch.tensor([kv_len for _, kv_len in lengths], dtype=torch.int32)
    return Case(q, pool, page_table, starts, kv_lens, dim**-0.5, kv)


def attend(case: Case, function: object = None, first_position: int = 0) -> torch.Tensor:
    call = paged_attention_reference if function is paged_attention_reference else paged_attention
    q_lens = case.cu_q_lens.diff()
    return in_parts(call)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        int(q_lens.max()) if len(q_lens) else 0,
        int(case.kv_lens.max()) if len(case.kv_lens) else 0,
        first_position=first_position,
    )


def exact_attention(case: Case, first_position: int = 0) -> torch.Tensor:
    """The definition, row by row, in float64."""
    heads = case.q.shape[1]
    out = torch.zeros_like(case.q, dtype=torch.float64)
    starts = case.cu_q_lens.tolist()
    for request, plain in enumerate(case.kv):
        k, v = plain.double().repeat_interleave(heads // plain.shape[1], dim=1)
        first, end = starts[request], starts[request + 1]
        for row in range(first, end):
            seen = slice(first_position, k.shape[1] - (end - 1 - row))
            if seen.start >= seen.stop:
                continue
            scores = torch.einsum("hd,hnd->hn", case.q[row].double(), k[:, seen]) * case.scale
            out[row] = torch.einsum("hn,hnd->hd", scores.softmax(-1), v[:, seen])
    return out.flatten(1)


def check(case: Case, first_position: int = 0) -> None:
    assert_as_exact(
        attend(case, first_position=first_position),
        attend(case, paged_attention_reference, first_position),
        exact_attention(case, first_position),
    )


def hide_first(case: Case, first_position: int) -> None:
    """NaN in the pool for the positions that are not to be read."""
    page_size = case.pool.shape[4]
    for request, kv_len in enumerate(case.kv_lens.tolist()):
        hidden = torch.arange(min(first_position, kv_len))
        pages = case.page_table[request, hidden // page_size].long()
        case.pool[pages, :, LAYER, :, hidden % page_size] = float("nan")


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_ragged_mix_of_decode_and_prefill(
    geometry: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    fresh_seed()
    lengths = [(1, 1), (1, 130), (37, 37), (5, 64), (0, 12), (1, 65), (40, 107), (2, 2), (1, 16)]
    random.shuffle(lengths)
    check(make_case(geometry, lengths, dtype))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_long_contexts_cross_segments(dtype: torch.dtype) -> None:
    fresh_seed()
    lengths = [(1, 8191), (1, 512), (3, 513), (70, 1100), (1, 1025)]
    check(make_case((6, 2, 64, 16), lengths, dtype))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(0, 5), (0, 9)], [(1, 1)]])
def test_nothing_or_hardly_anything(lengths: list[tuple[int, int]]) -> None:
    case = make_case((4, 2, 16, 8), lengths, torch.float32)
    out = attend(case)
    assert out.shape == (len(case.q), 64)
    if len(case.q):
        check(case)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_neither_overflow_nor_vanish(dtype: torch.dtype) -> None:
    fresh_seed()
    case = make_case((4, 2, 64, 16), [(3, 200), (1, 700)], dtype)
    case.q.mul_(60)
    # A score of some hundreds is rounded by as many steps, in an order of sums that varies; where
    # two of them nearly tie, that rounding is the error of the result.
    keys = torch.cat([kv[0].flatten(0, 1) for kv in case.kv]).float()
    largest_score = case.scale * case.q.float().norm(dim=-1).max() * keys.norm(dim=-1).max()
    slack = torch.finfo(torch.float32).eps * largest_score.item()
    exact = exact_attention(case)
    assert_as_exact(attend(case), attend(case, paged_attention_reference), exact, 4, slack)


@pytest.mark.usefixtures("path")
@pytest.mark.each_of("geometry", "first_position")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES[:3])
@pytest.mark.parametrize("first_position", [1, 7, 600])
def test_positions_before_the_first_are_not_attended_to(
    geometry: tuple[int, int, int, int], dtype: torch.dtype, first_position: int
) -> None:
    fresh_seed()
    short = [(1, 1), (1, 2), (1, 8), (3, 3), (40, 40), (9, 15), (0, 12), (1, 64), (1, 65)]
    case = make_case(geometry, [*short, (1, 700), (3, 513), (70, 1100)], dtype)
    hide_first(case, first_position)
    check(case, first_position)
    positions = torch.cat(
        [
            torch.arange(kv_len - q_len, kv_len)
            for q_len, kv_len in zip(case.cu_q_lens.diff(), case.kv_lens, strict=True)
        ]
    )
    blind = attend(case, first_position=first_position)[positions < first_position]
    assert len(blind)
    assert not blind.any()


def test_a_negative_first_position_is_refused() -> None:
    case = make_case((4, 2, 16, 8), [(1, 20)], torch.float32)
    with pytest.raises(ValueError, match="first_position"):
        attend(case, first_position=-1)


@pytest.mark.parametrize("first_position", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_how_it_is_batched(
    dtype: torch.dtype, first_position: int
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    fresh_seed()
    case = make_case((9, 3, 64, 16), [(150, 1200), (1, 600), (20, 20)], dtype)
    whole = attend(case, first_position=first_position)
    for row in (0, 1, 149, 150, 151, 170):
        request = int(torch.searchsorted(case.cu_q_lens, row, right=True)) - 1
        behind = int(case.cu_q_lens[request + 1]) - 1 - row
        alone = case._replace(
            q=case.q[row : row + 1],
            page_table=case.page_table[request : request + 1],
            cu_q_lens=torch.tensor([0, 1], dtype=torch.int32),
            kv_lens=case.kv_lens[request : request + 1] - behind,
        )
        assert torch.equal(attend(alone, first_position=first_position)[0], whole[row])


def test_pages_and_lengths_outside_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    case = make_case((4, 2, 16, 8), [(2, 20), (1, 9)], torch.float32)
    for bad in (-1, len(case.pool)):
        table = case.page_table.clone()
        table[0, 2] = bad
        with pytest.raises(IndexError, match="page"):
            attend(case._replace(page_table=table))
    for kv_lens in ([20, 1000], [1, 9], [20, -3]):
        with pytest.raises(IndexError, match="fit together"):
            attend(case._replace(kv_lens=torch.tensor(kv_lens, dtype=torch.int32)))
    for cu_q_lens in ([0, 2, 2], [0, 4, 3], [1, 2, 3]):
        with pytest.raises(IndexError, match="fit together"):
            attend(case._replace(cu_q_lens=torch.tensor(cu_q_lens, dtype=torch.int32)))
    with pytest.raises(ValueError, match="kv_lens"):
        attend(case._replace(kv_lens=case.kv_lens.long()))
    with pytest.raises(ValueError, match="does not fit"):
        attend(case._replace(q=case.q.bfloat16()))


def test_a_strided_page_table_is_read_by_its_rows() -> None:
    case = make_case((4, 2, 16, 8), [(2, 20), (1, 9)], torch.float32)
    wide = torch.full((2, 50), -1, dtype=torch.int32)
    wide[:, : case.page_table.shape[1]] = case.page_table
    assert torch.equal(attend(case), attend(case._replace(page_table=wide[:, :4])))


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        (
            "t->first_position + at + 1",
            "t->first_position + at",
        ),
        ("scratch->sum_weight[row] * shrink +", "scratch->sum_weight[row] +"),
        ("if (weight == 0) weight = 1;", ""),
    ],
)
def test_the_check_sees_a_mutation(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    native = mutated_native_cpu(tmp_path, "attention.h", original, replacement)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    with pytest.raises(AssertionError):
        check(make_case((6, 2, 64, 16), [(5, 200), (1, 300), (2, 2)], torch.float32), 1)
