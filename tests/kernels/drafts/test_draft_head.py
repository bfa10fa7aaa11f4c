"""A draft head's native operations against their single operations, on fresh random inputs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from weft.kernels.ops.draft_head import DraftEntries, draft_chain
from weft.kernels.ops.draft_head.operations import draft_chain_reference, draft_entries_reference
from weft.kernels.ops.draft_head.spec import DraftChains, DraftHeadWeight, DraftRows
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed, mutated_native_cpu
from weft.testing.kernels.near_ties import draw_clear
from weft.testing.kernels.wide_pages import WidePages

pytestmark = pytest.mark.needs("cc")

LAYERS, LAYER = 2, 1
VOCAB, DRAFT_VOCAB = 301, 131
MAX_POSITIONS = 1200
PAGE = 8
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


class Geometry(NamedTuple):
    hidden: int
    heads: int
    kv_heads: int
    dim: int
    inner: int


GEOMETRIES = [Geometry(72, 6, 2, 24, 100), Geometry(64, 3, 3, 16, 33), Geometry(136, 4, 1, 64, 96)]


def make_head(geometry: Geometry, dtype: torch.dtype) -> DraftHeadWeight:
    hidden, heads, kv_heads, dim, inner = geometry

    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) / columns**0.5).to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.2 * torch.randn(hidden)).to(dtype)

    qkv = normal((heads + 2 * kv_heads) * dim, 2 * hidden)
    angles = torch.outer(torch.arange(MAX_POSITIONS), 0.3 ** torch.arange(dim // 2))
    return DraftHeadWeight(
        fc=pack_linear(normal(hidden, 3 * 40)),
        qkv=pack_linear(qkv),
        kv=pack_linear(qkv[heads * dim :]),
        o=pack_linear(normal(hidden, heads * dim)),
        gate_up=pack_gate_up(normal(2 * inner, hidden)),
        down=pack_linear(normal(hidden, inner)),
        lm_head=pack_linear(normal(DRAFT_VOCAB, hidden)),
        input_norm=norm(),
        hidden_norm=norm(),
        post_norm=norm(),
        norm=norm(),
        embedding=torch.randn(VOCAB, hidden).to(dtype),
        target_ids=torch.randperm(VOCAB)[:DRAFT_VOCAB],
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1).float(),
        num_heads=heads,
        eps=1e-5,
        norms_first=bool(torch.rand(()) < 0.5),
    )


class Step(NamedTuple):
    """A target's step over a pool of NaN."""

    aux: torch.Tensor
    rows: DraftRows
    kept: torch.Tensor
    pool: torch.Tensor

    def copy(self) -> Step:
        return self._replace(kept=self.kept.clone(), pool=self.pool.clone())


def make_step(geometry: Geometry, lengths: list[tuple[int, int]], dtype: torch.dtype) -> Step:
    """Requests of (first position, rows)."""
    num_rows = sum(count for _, count in lengths)
    num_pages = num_rows // PAGE + 5
    pool = torch.full(
        (num_pages, geometry.kv_heads, LAYERS, 2, PAGE, geometry.dim), float("nan"), dtype=dtype
    )
    rows = DraftRows(
        token_ids=torch.randint(VOCAB, (num_rows,)),
        positions=torch.cat([torch.arange(first, first + count) for first, count in lengths]),
        slots=torch.randperm(num_pages * PAGE)[:num_rows],
        cu_q_lens=torch.tensor([0, *(count for _, count in lengths)]).cumsum(0).int(),
        request_slots=torch.randperm(len(lengths) + 3)[: len(lengths)],
    )
    kept = torch.randn(len(lengths) + 3, geometry.hidden).to(dtype)
    return Step(torch.randn(num_rows, 3 * 40).to(dtype), rows, kept, pool)


def check_entries(w: DraftHeadWeight, step: Step, dtype: torch.dtype) -> None:
    ours, peer = step.copy(), step.copy()
    g = DraftEntries(ours.aux, w, ours.rows, ours.kept, ours.pool, LAYER).finish()
    peer_g = draft_entries_reference(peer.aux, w, peer.rows, peer.kept, peer.pool, LAYER)
    for mine, other in ((g, peer_g), (ours.kept, peer.kept), (ours.pool, peer.pool)):
        assert torch.equal(mine.isnan(), other.isnan())
        mine, other = mine.double().nan_to_num(0.0), other.double().nan_to_num(0.0)
        error = (mine - other).abs().max() / other.abs().max()
        assert error < TOLERANCES[dtype], float(error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_entries_of_a_ragged_step(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    w = make_head(geometry, dtype)
    assert w.native is not None
    for lengths in ([(0, 1)], [(5, 1)], [(0, 7), (3, 1), (0, 1), (30, 90), (1, 2)]):
        check_entries(w, make_step(geometry, lengths, dtype), dtype)


Drawn = tuple[torch.Tensor, torch.Tensor, DraftChains, torch.Tensor]


def make_chains(
    geometry: Geometry, starts: list[int], wanted: list[int], dtype: torch.dtype
) -> Drawn:
    """State, last tokens, chains and a pool with entries from position 1 up to each start."""
    depth, requests = max(wanted), len(starts)
    ends = [start + count for start, count in zip(starts, wanted, strict=True)]
    counts = [-(-end // PAGE) for end in ends]
    num_pages = sum(counts) + 2
    free = torch.randperm(num_pages).tolist()
    table = torch.full((requests, max(counts) + 1), -1, dtype=torch.int32)
    shape = (num_pages, geometry.kv_heads, LAYERS, 2, PAGE, geometry.dim)
    pool = torch.full(shape, float("nan"), dtype=dtype)
    positions = torch.tensor(starts) + torch.arange(depth)[:, None]
    for request, (start, count) in enumerate(zip(starts, counts, strict=True)):
        pages = [free.pop() for _ in range(count)]
        table[request, :count] = torch.tensor(pages)
        for position in range(1, start):
            page = pages[position // PAGE]
            pool[page, :, LAYER, :, position % PAGE] = torch.randn(2, geometry.dim).to(dtype)
        positions[:, request].clamp_(max=ends[request] - 1)
    pages_of = table.long().gather(1, (positions // PAGE).T).T
    chains = DraftChains(
        positions=positions,
        slots=(pages_of * PAGE + positions % PAGE).contiguous(),
        kv_lens=(positions + 1).int(),
        counts=[sum(count > done for count in wanted) for done in range(depth)],
        page_table=table,
        one_row_each=torch.arange(requests + 1, dtype=torch.int32),
        max_kv_len=max(ends),
    )
    state = torch.randn(requests, geometry.hidden).to(dtype)
    return state, torch.randint(VOCAB, (requests,)), chains, pool


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("wanted", [[1], [6], [5, 5, 3, 1, 1]])
def test_chains(geometry: Geometry, wanted: list[int]) -> None:
    fresh_seed()
    w = make_head(geometry, torch.float32)
    starts = [1, 2, 40, 1030, 63][: len(wanted)]

    def follow(drawn: Drawn) -> None:
        state, tokens, chains, pool = drawn
        draft_chain_reference(state, tokens, w, chains, pool.clone(), LAYER)

    state, tokens, chains, pool = draw_clear(
        lambda: make_chains(geometry, starts, wanted, torch.float32), follow
    )
    peer_pool = pool.clone()
    peer = draft_chain_reference(state.clone(), tokens, w, chains, peer_pool, LAYER)
    ours = draft_chain(state.clone(), tokens, w, chains, pool, LAYER)
    assert ours.shape == (wanted[0], len(wanted))
    for step, count in enumerate(chains.counts):
        assert torch.equal(ours[step, :count], peer[step, :count])
    assert torch.equal(pool.isnan(), peer_pool.isnan())
    torch.testing.assert_close(pool, peer_pool, rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_may_lie_apart(dtype: torch.dtype) -> None:
    """Entries, then chains: as in a contiguous pool, and nothing between pages is written."""
    fresh_seed()
    geometry = GEOMETRIES[0]
    w = make_head(geometry, dtype)
    step = make_step(geometry, [(0, 7), (3, 1), (30, 20)], dtype)
    wide, kept = WidePages(step.pool), step.kept.clone()
    g = DraftEntries(step.aux, w, step.rows, step.kept, step.pool, LAYER).finish()
    assert torch.equal(DraftEntries(step.aux, w, step.rows, kept, wide.pool, LAYER).finish(), g)
    wide.check(step.pool)
    state, tokens, chains, pool = make_chains(geometry, [1, 40, 300], [4, 4, 2], dtype)
    wide, other = WidePages(pool), state.clone()
    found = draft_chain(other, tokens, w, chains, wide.pool, LAYER)
    expected = draft_chain(state, tokens, w, chains, pool, LAYER)
    for depth, count in enumerate(chains.counts):
        assert torch.equal(found[depth, :count], expected[depth, :count])
    assert torch.equal(other, state)
    wide.check(pool)


def test_bfloat16_chains_end_in_the_same_states() -> None:
    """Tokens may differ where two are nearly as likely; the first step's state may not."""
    fresh_seed()
    geometry = GEOMETRIES[0]
    w = make_head(geometry, torch.bfloat16)
    state, tokens, chains, pool = make_chains(geometry, [9, 70], [1, 1], torch.bfloat16)
    peer_pool, after = pool.clone(), state.clone()
    ours = draft_chain(after, tokens, w, chains, pool, LAYER)
    draft_chain_reference(state, tokens, w, chains, peer_pool, LAYER)
    torch.testing.assert_close(pool, peer_pool, rtol=0.05, atol=0.05, equal_nan=True)
    assert not torch.equal(after, state)
    assert set(ours.flatten().tolist()) <= set(w.target_ids.tolist())


def test_a_request_does_not_depend_on_the_others() -> None:
    fresh_seed()
    geometry = GEOMETRIES[2]
    w = make_head(geometry, torch.bfloat16)
    state, tokens, chains, pool = make_chains(geometry, [30, 700, 5], [4, 4, 4], torch.bfloat16)
    before, whole_state = pool.clone(), state.clone()
    whole = draft_chain(whole_state, tokens, w, chains, pool, LAYER)
    for r in range(3):
        one = slice(r, r + 1)
        alone = replace(
            chains,
            positions=chains.positions[:, one].contiguous(),
            slots=chains.slots[:, one].contiguous(),
            kv_lens=chains.kv_lens[:, one].contiguous(),
            counts=[1] * 4,
            page_table=chains.page_table[one],
            one_row_each=chains.one_row_each[:2],
        )
        last = state[one].clone()
        assert torch.equal(
            draft_chain(last, tokens[one], w, alone, before.clone(), LAYER)[:, 0], whole[:, r]
        )
        assert torch.equal(last[0], whole_state[r])


def test_what_points_outside_is_refused_and_nothing_is_written() -> None:
    geometry = GEOMETRIES[0]
    w = make_head(geometry, torch.float32)
    step = make_step(geometry, [(0, 3), (4, 2)], torch.float32)
    rows = step.rows
    for name, at, bad, message in (
        ("token_ids", 1, VOCAB, "token"),
        ("positions", 0, MAX_POSITIONS, "position"),
        ("slots", 2, -1, "slot"),
        ("request_slots", 1, 5, "slot"),
        ("cu_q_lens", 1, 6, "fit together"),
    ):
        changed = getattr(rows, name).clone()
        changed[at] = bad
        bad_rows = replace(rows, **{name: changed})
        with pytest.raises(IndexError, match=message):
            DraftEntries(step.aux, w, bad_rows, step.kept, step.pool, LAYER).finish()
    with pytest.raises(IndexError, match="layer 2"):
        DraftEntries(step.aux, w, rows, step.kept, step.pool, LAYERS).finish()
    with pytest.raises(ValueError, match="aux"):
        DraftEntries(step.aux[:, :60], w, rows, step.kept, step.pool, LAYER).finish()
    assert step.pool.isnan().all()
    state, tokens, chains, pool = make_chains(geometry, [9, 20], [2, 2], torch.float32)
    before = pool.clone()
    table = chains.page_table.clone()
    table[1, 0] = len(pool)
    with pytest.raises(IndexError, match="page"):
        draft_chain(state, tokens, w, replace(chains, page_table=table), pool, LAYER)
    with pytest.raises(IndexError, match="token"):
        draft_chain(state, tokens - VOCAB, w, chains, pool, LAYER)
    with pytest.raises(IndexError, match="fit together"):
        draft_chain(state, tokens, w, replace(chains, counts=[1, 2]), pool, LAYER)
    with pytest.raises(ValueError, match="counts"):
        draft_chain(state, tokens, w, replace(chains, counts=[1]), pool, LAYER)
    assert torch.equal(pool.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("return row - 1;", "return row;"),
        ("if (e->positions[row] == 0)", "if (0)"),
        ("(e->cu_q_lens[r + 1] - 1) * bytes", "e->cu_q_lens[r] * bytes"),
    ],
)
def test_the_check_sees_a_mutation(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = GEOMETRIES[0]
    w = make_head(geometry, torch.float32)
    step = make_step(geometry, [(0, 5), (7, 3)], torch.float32)
    native = mutated_native_cpu(tmp_path, "draft.h", original, replacement)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    with pytest.raises(AssertionError):
        check_entries(w, step, torch.float32)
