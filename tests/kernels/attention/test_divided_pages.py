"""Attention to pages that ranks divide is attention to all of them."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from weft.kernels.ops import divided_pages
from weft.kernels.ops.attention import triton_decode
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.divided_pages import divided, triton_rows
from weft.kernels.ops.divided_pages.reference import merged_reference
from weft.kernels.ops.latent_attention import triton_latent
from weft.kernels.ops.latent_attention.reference import latent_attention_reference
from weft.kernels.ops.latent_attention.spec import LatentSpec
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.kernel_checks import fresh_seed

PAGE, LAYER, HEADS = 8, 1, 3


class ItsTurn(NamedTuple):
    """One of several ranks that take turns in one process: `PageRanks` up to its merge."""

    rank: int
    size: int
    has_one_pool: bool
    all_heads: torch.Tensor
    found: list[tuple[torch.Tensor, torch.Tensor]]

    def gather(self, q: torch.Tensor) -> torch.Tensor:
        return self.all_heads

    def merge(
        self, values: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.found.append((values, sums))
        return values.new_zeros((len(values), HEADS, values.shape[2]))


def make_step(num_pages: int) -> AttentionMetadata:
    """Chunks that begin and end at borders of pages, one before and one after, and padding."""
    q_lens = [1, 1, 1, PAGE, PAGE - 1, PAGE + 1, random.randint(2, 30), 1]
    before = [0, PAGE - 1, PAGE, 3 * PAGE, 2 * PAGE + 1, 5 * PAGE - 1, random.randint(0, 50), 100]
    kv_lens = [first + count for first, count in zip(before, q_lens, strict=True)]
    order = (1 + torch.randperm(num_pages - 1)).int()
    table = torch.full((len(q_lens), 16), -1, dtype=torch.int32)
    places = []
    for request, (first, kv) in enumerate(zip(before, kv_lens, strict=True)):
        count = -(-kv // PAGE)
        table[request, :count], order = order[:count], order[count:]
        positions = torch.arange(first, kv)
        places.append(table[request, positions // PAGE].long() * PAGE + positions % PAGE)
    return AttentionMetadata(
        page_table=table,
        places=torch.cat([*places, torch.zeros(3, dtype=torch.int64)]),
        cu_q_lens=torch.tensor([0, *q_lens]).cumsum(0).int(),
        kv_lens=torch.tensor(kv_lens).int(),
        max_q_len=max(q_lens),
        max_kv_len=16 * PAGE,
    )


def pool_of(pool: torch.Tensor, rank: int, size: int, *, is_one: bool) -> torch.Tensor:
    """What a rank has: its pages in a pool of its own, or in one pool nothing but its pages."""
    own = pool.clone()
    if not is_one:
        return torch.cat((torch.full_like(own[:1], float("nan")), own[rank::size]))
    own[torch.arange(len(own)) % size != rank] = float("nan")
    return own


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["heads", "sinks and a cap", "latents"])
def test_merged_parts_are_the_attention_to_all_pages(kind: str, size: int, is_one: bool) -> None:
    check(kind, size, torch.float64, is_one=is_one)


@pytest.mark.full
@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("kind", ["heads", "sinks and a cap", "latents"])
def test_parts_of_the_kernels_for_a_gpu(
    kind: str, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (triton_latent, triton_decode):
        monkeypatch.setattr(module, "num_multiprocessors", lambda _: 1000 if splits else 1)
    monkeypatch.setattr(triton_latent, "_MIN_PART", 16)
    with as_on_gpu():
        check(kind, 2, torch.float32, is_one=False)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize("is_told", [True, False])
def test_the_kernel_finds_what_rows_see_on_a_rank(
    is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a page table, and the requests, take more than one turn."""
    monkeypatch.setattr(triton_rows, "_COLUMNS", 4)
    fresh_seed()
    step, size = make_step(64), random.choice((2, 3))
    if is_told:
        most = step.kv_lens.repeat_interleave(step.cu_q_lens.diff())
        ends = torch.cat((most, most.new_zeros(3))) * torch.rand(len(step.places))
        step = step._replace(key_ends=ends.int())
    requests = torch.searchsorted(step.cu_q_lens.long(), torch.arange(len(step.places)), right=True)
    requests = (requests - 1).clamp(max=len(step.kv_lens) - 1)
    for rank in range(size):
        ranks = ItsTurn(rank, size, False, step.places, [])
        expected, found = divided(step, ranks, PAGE), triton_rows.divided_rows(step, ranks, PAGE)
        assert torch.equal(found.places, expected.places)
        assert found.divided is not None
        assert expected.divided is not None
        for one, other in zip(found.divided, expected.divided, strict=True):
            assert torch.equal(one, other)
        assert found.here is not None
        assert expected.here is not None
        rows, right = found.here.step, expected.here.step
        assert rows.key_ends is not None
        assert right.key_ends is not None
        assert torch.equal(rows.key_ends, right.key_ends)
        assert torch.equal(rows.kv_lens, right.key_ends + 1)
        assert rows.cu_q_lens.tolist() == list(range(len(step.places) + 1))
        assert torch.equal(rows.page_table, right.page_table[requests])


def check(kind: str, size: int, dtype: torch.dtype, *, is_one: bool) -> None:
    fresh_seed()
    num_pages, is_latent = 64, kind == "latents"
    step = make_step(num_pages)
    rows, dim = len(step.places) - 3, 40
    parts, heads = (1, HEADS * size) if is_latent else (2, HEADS * size)
    pool = torch.randn(num_pages, 1, 2, parts, PAGE, dim, dtype=dtype)
    q = torch.randn(rows + 3, heads, dim, dtype=dtype)
    sinks = torch.randn(heads) if kind == "sinks and a cap" else None
    softcap = None if sinks is None else 5.0
    spec = AttentionSpec(heads, 1, dim, 0.3, sinks=sinks, softcap=softcap)
    latent = LatentSpec(heads, 24, 0.3)
    exact = step._replace(places=step.places[:rows])
    wide, wide_pool = q[:rows].double(), pool.double()
    if is_latent:
        expected = latent_attention_reference(wide, wide_pool, LAYER, latent, exact)
    else:
        expected = paged_attention_reference(wide, wide_pool, LAYER, spec, exact)
    expected = expected.view(rows, heads, -1)
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    written = torch.zeros(num_pages * PAGE, dtype=torch.int64)
    for rank in range(size):
        step_here = divided(step, ItsTurn(rank, size, is_one, q, found), PAGE)
        assert step_here.here is not None
        own = pool_of(pool, rank, size, is_one=is_one)
        mine = q[:, rank * HEADS : (rank + 1) * HEADS].contiguous()
        if is_latent:
            own_spec = latent._replace(heads=HEADS)
            divided_pages.latent_attention(mine, own, LAYER, own_spec, step_here.here)
        else:
            divided_pages.attention(mine, own, LAYER, spec._replace(heads=HEADS), step_here.here)
        places = step_here.places[:rows]
        pages, offsets = places // PAGE, places % PAGE
        is_written = pages > 0
        if not is_one:
            pages = (pages - 1) * size + rank
        written.index_add_(
            0, (pages * PAGE + offsets)[is_written], torch.ones_like(places)[is_written]
        )
    values, sums = (torch.stack(each) for each in zip(*found, strict=True))
    merged = merged_reference(values, sums, sinks)[:rows]
    torch.testing.assert_close(merged.double(), expected, rtol=1e-5, atol=1e-5)
    # Each row is written once, where all pages in one pool have it.
    assert written.nonzero()[:, 0].tolist() == step.places[:rows].sort().values.tolist()
    assert written.max() == 1
