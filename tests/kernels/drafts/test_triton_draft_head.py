"""A draft head of the GPU's kernels, by Triton's interpreter, against its single operations.

Rows and requests are padded as captured graphs pad them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.activation import triton_activation
from weft.kernels.ops.attention import gpu as attention
from weft.kernels.ops.draft_head import operations
from weft.kernels.ops.draft_head import triton_rows as draft_rows
from weft.kernels.ops.draft_head.operations import draft_chain_reference, draft_entries_reference
from weft.kernels.ops.draft_head.spec import DraftChains, DraftHeadWeight, DraftRows
from weft.kernels.ops.greedy import triton_rows as greedy
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import triton_rms as norm
from weft.kernels.ops.rope import triton_rope as rope
from weft.kernels.shared import cpu
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.near_ties import draw_clear
from weft.testing.kernels.tree_cases import random_parents, words_of
from weft.testing.kernels.wide_pages import WidePages

pytestmark = pytest.mark.needs("triton-interpreter")

HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, DRAFT_VOCAB = 48, 4, 2, 16, 64, 90, 40
PAGE, PAGES_EACH, LAYERS, LAYER = 4, 4, 3, 2
MAX_POSITIONS = PAGE * PAGES_EACH


@pytest.fixture(autouse=True)
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU has them."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)


def make_head() -> DraftHeadWeight:
    def table(*shape: int) -> torch.Tensor:
        return torch.randn(shape) / shape[-1] ** 0.5

    qkv = table((HEADS + 2 * KV_HEADS) * DIM, 2 * HIDDEN)
    norms = [torch.rand(HIDDEN) + 0.5 for _ in range(4)]
    return DraftHeadWeight(
        fc=pack_linear(table(HIDDEN, 3 * HIDDEN)),
        qkv=pack_linear(qkv),
        kv=pack_linear(qkv[HEADS * DIM :].contiguous()),
        o=pack_linear(table(HIDDEN, HEADS * DIM)),
        gate_up=pack_gate_up(table(2 * INNER, HIDDEN)),
        down=pack_linear(table(HIDDEN, INNER)),
        lm_head=pack_linear(table(DRAFT_VOCAB, HIDDEN)),
        input_norm=norms[0],
        hidden_norm=norms[1],
        post_norm=norms[2],
        norm=norms[3],
        embedding=torch.randn(VOCAB, HIDDEN),
        target_ids=torch.randperm(VOCAB)[:DRAFT_VOCAB],
        cos_sin=torch.randn(MAX_POSITIONS, DIM),
        num_heads=HEADS,
        eps=1e-5,
    )


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Lets the single operations take what they take on a GPU."""

    def rope_and_cache(
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        pool: torch.Tensor,
        layer: int,
        slots: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
    ) -> torch.Tensor:
        assert num_kv_heads == pool.shape[1]
        plain = (None, None, 1e-6)
        return rope.rope_and_cache(qkv, positions, cos_sin, pool, layer, slots, num_heads, *plain)

    def normed_linear(
        x: torch.Tensor,
        gain: torch.Tensor,
        eps: float,
        w: LinearWeight,
        out_dtype: torch.dtype | None = None,
        lora: None = None,
    ) -> torch.Tensor:
        assert lora is None
        product = norm.rms_norm(x, gain, eps) @ w.data.t()
        return (
            triton_activation.activate(product, "silu", is_gated=True)
            if w.gated
            else product.to(out_dtype)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "rope_and_cache", rope_and_cache)
        patch.setattr(operations, "paged_attention", attention.paged_attention)
        patch.setattr(operations, "normed_linear", normed_linear)
        patch.setattr(operations, "rms_norm", norm.rms_norm)
        patch.setattr(operations, "_join", draft_rows.join_rows)
        patch.setattr(operations, "_join_shifted", draft_rows.join_shifted)
        patch.setattr(operations, "_keep_last", draft_rows.keep_last)
        patch.setattr(operations, "_choose", greedy.greedy_rows)
        yield


def make_pool(requests: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of NaN but for the null page, and a table whose last row names that only."""
    shape = (1 + requests * PAGES_EACH, KV_HEADS, LAYERS, 2, PAGE, DIM)
    pages = 1 + torch.randperm(shape[0] - 1, dtype=torch.int32).view(requests, PAGES_EACH)
    pool = torch.full(shape, float("nan"))
    return pool, torch.cat([pages, torch.zeros((1, PAGES_EACH), dtype=torch.int32)])


def test_entries_and_chains() -> None:
    fresh_seed()
    w, requests, depth = make_head(), 3, 3
    pool, table = make_pool(requests)
    lengths, cached = [1, PAGE + 1, 7], [0, 3, 0]
    # The second request goes on behind what an earlier step left in its slot and its pages.
    pool[table[1, 0].long(), :, LAYER, :, : cached[1]] = torch.randn(KV_HEADS, 2, cached[1], DIM)
    positions = torch.cat(
        [torch.arange(begin, begin + n) for begin, n in zip(cached, lengths, strict=True)]
    )
    owners = torch.arange(requests).repeat_interleave(torch.tensor(lengths))
    padding = 2
    pad = torch.zeros(padding, dtype=torch.int64)
    places = table[owners, positions // PAGE].long() * PAGE + positions % PAGE
    ends = torch.tensor([0, *lengths]).cumsum(0)
    rows = DraftRows(
        token_ids=torch.cat([torch.randint(0, VOCAB, (len(positions),)), pad]),
        positions=torch.cat([positions, pad]),
        slots=torch.cat([places, pad]),
        cu_q_lens=torch.cat([ends, ends[-1:]]).to(torch.int32),
        request_slots=torch.tensor([*range(requests), requests]),
    )
    aux, kept = torch.randn(len(positions) + padding, 3 * HIDDEN), torch.randn(requests + 1, HIDDEN)
    starts = torch.tensor([*(a + b for a, b in zip(cached, lengths, strict=True)), 0])
    each = torch.arange(depth)[:, None] * (starts > 0)
    chain_positions = starts + each
    request_of = torch.arange(requests + 1)
    chain_pages = table[request_of, chain_positions // PAGE].long()
    chains = DraftChains(
        positions=chain_positions,
        slots=chain_pages * PAGE + chain_positions % PAGE,
        kv_lens=(chain_positions + 1).to(torch.int32),
        counts=[requests + 1] * depth,
        page_table=table,
        one_row_each=torch.arange(requests + 2, dtype=torch.int32),
        max_kv_len=MAX_POSITIONS,
    )
    alone = replace(
        chains,
        positions=chains.positions[:, :requests],
        slots=chains.slots[:, :requests],
        kv_lens=chains.kv_lens[:, :requests],
        counts=[requests] * depth,
        page_table=table[:requests],
        one_row_each=chains.one_row_each[:-1],
    )

    def run(
        last: torch.Tensor, pool: torch.Tensor, kept: torch.Tensor, chains: DraftChains
    ) -> tuple[torch.Tensor, torch.Tensor]:
        g = draft_entries_reference(aux, w, rows, kept, pool, LAYER)
        count = chains.positions.shape[1]
        state, tokens = kept[:count].clone(), last[:count]
        return g, draft_chain_reference(state, tokens, w, chains, pool, LAYER)

    last = draw_clear(
        lambda: torch.randint(0, VOCAB, (requests + 1,)),
        lambda drawn: run(drawn, pool.clone(), kept.clone(), alone),
    )
    found_pool, found_kept = pool.clone(), kept.clone()
    wide, wide_kept = WidePages(pool), kept.clone()
    with gpu_kernels():
        found_g, found = run(last, found_pool, found_kept, chains)
        # In pages that lie apart: the same bits.
        other_g, other = run(last, wide.pool, wide_kept, chains)
    assert torch.equal(other_g, found_g)
    assert torch.equal(other, found)
    wide.check(found_pool)
    g, tokens = run(last, pool, kept, alone)
    torch.testing.assert_close(found_g, g)
    torch.testing.assert_close(found_kept[:requests], kept[:requests])
    assert torch.equal(found[:, :requests], tokens)
    torch.testing.assert_close(found_pool[1:], pool[1:], equal_nan=True)


def test_rows_of_trees_follow_their_parents() -> None:
    """By each way to do it, against plain loops; the first one as its request's state says."""
    fresh_seed()
    w, lengths = make_head(), [5, 1, 32, 40, 9]
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    rows = int(bounds[-1])
    words = torch.full((rows,), -1)
    g, kept = torch.randn(rows, HIDDEN), torch.randn(len(lengths) + 1, HIDDEN)
    slots = torch.randperm(len(lengths) + 1)[: len(lengths)]
    before = torch.empty_like(g)
    for request, length in enumerate(lengths):
        first = int(bounds[request])
        parents = list(range(-1, length - 1))
        if length <= 32:
            parents = random_parents(length)
            words[first : first + length] = torch.tensor(words_of(parents))
        before[first] = kept[slots[request]]
        for row in range(1, length):
            before[first + row] = g[first + parents[row]]
    described = DraftRows(
        token_ids=torch.randint(0, VOCAB, (rows,)),
        positions=torch.randint(1, 9, (rows,)),
        slots=torch.arange(rows),
        cu_q_lens=bounds.to(torch.int32),
        request_slots=slots,
        ancestors=words,
    )
    expected = operations._join(w, described.token_ids, before)
    for join in (operations._join_shifted, draft_rows.join_shifted):
        torch.testing.assert_close(join(w, described, g, kept), expected)


def test_rows_of_decode_steps() -> None:
    """Requests of one row each are told so, and found without looking."""
    fresh_seed()
    w, requests = make_head(), 5
    g, kept = torch.randn(requests, HIDDEN), torch.randn(requests + 1, HIDDEN)
    rows = DraftRows(
        token_ids=torch.randint(0, VOCAB, (requests,)),
        positions=torch.tensor([4, 0, 9, 1, 0]),
        slots=torch.arange(requests),
        cu_q_lens=torch.arange(requests + 1, dtype=torch.int32),
        request_slots=torch.randperm(requests + 1)[:requests],
    )
    expected = operations._join_shifted(w, rows, g, kept)
    for is_uniform in (False, True):
        found = draft_rows.join_shifted(w, replace(rows, is_uniform=is_uniform), g, kept)
        torch.testing.assert_close(found, expected)
    other = kept.clone()
    operations._keep_last(g, rows, kept)
    draft_rows.keep_last(g, rows, other)
    assert torch.equal(other, kept)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        (test_entries_and_chains, ("tl.where(row == first, kept_width, 0)", "kept_width")),
        (test_entries_and_chains, ("at = row_before * width", "at = row.to(tl.int64) * width")),
        (test_rows_of_trees_follow_their_parents,
         ("tl.where(word < 0, row - 1,", "tl.where(word < 0, row,")),
        (test_rows_of_decode_steps, ("if end == tl.load(", "if end - 1 == tl.load(")),
    ],
)  # fmt: skip
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    check: Callable[[], None],
    change: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_kernels(monkeypatch, draft_rows, tmp_path, change)
    assert notices(check)
