"""A draft head's entries written by the threads that run the target's layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from weft.engine.model.stack import run_all
from weft.engine.model.step import Step
from weft.kernels.ops.draft_head import DraftEntries
from weft.kernels.ops.draft_head.spec import DraftHeadWeight, DraftRows
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.stream.taps import Taps
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    make_run,
    make_step,
)

pytestmark = pytest.mark.needs("cc")

WIDTH, VOCAB, SLOTS = 72, 97, 7
MAX_POSITIONS = 400


def make_head(num_taps: int, dtype: torch.dtype) -> DraftHeadWeight:
    def normal(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns) / columns**0.5).to(dtype)

    qkv = normal((HEADS + 2 * KV_HEADS) * DIM, 2 * WIDTH)
    angles = torch.rand(MAX_POSITIONS, DIM // 2)
    return DraftHeadWeight(
        fc=pack_linear(normal(WIDTH, num_taps * HIDDEN)),
        qkv=pack_linear(qkv),
        kv=pack_linear(qkv[HEADS * DIM :]),
        o=pack_linear(normal(WIDTH, HEADS * DIM)),
        gate_up=pack_gate_up(normal(64, WIDTH)),
        down=pack_linear(normal(WIDTH, 32)),
        lm_head=pack_linear(normal(VOCAB, WIDTH)),
        **dict.fromkeys(
            ("input_norm", "hidden_norm", "post_norm", "norm"), torch.ones(WIDTH, dtype=dtype)
        ),
        embedding=torch.randn(VOCAB, WIDTH).to(dtype),
        target_ids=torch.arange(VOCAB),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=1),
        num_heads=HEADS,
        eps=1e-5,
    )


def rows_of(step: Step) -> DraftRows:
    (group,) = step.groups
    return DraftRows(
        token_ids=torch.randint(VOCAB, step.positions.shape),
        positions=step.positions,
        slots=group.places,
        cu_q_lens=group.cu_q_lens,
        request_slots=torch.randperm(SLOTS)[: len(group.kv_lens)],
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layers", [(0, 1), (1, 1), (0, LAYERS - 1), (1, LAYERS)])
@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 60), (50, 70), (3, 3), (1, 17)]])
def test_are_those_written_after_them(
    lengths: list[tuple[int, int]], layers: tuple[int, int], dtype: torch.dtype
) -> None:
    """Bit for bit. What the layers do not have all of is left to the caller."""
    fresh_seed()
    run = make_run(dtype, False)
    w, num_rows = make_head(len(layers), dtype), sum(q for q, _ in lengths)
    assert w.native is not None
    shape = (12 * len(lengths), KV_HEADS, LAYERS + 1, 2, PAGE_SIZE, DIM)
    pool, kept = torch.randn(shape).to(dtype), torch.randn(SLOTS, WIDTH).to(dtype)
    hidden, last = (torch.randn(num_rows, HIDDEN).to(dtype) for _ in range(2))
    other_pool, other_kept = pool.clone(), kept.clone()
    step = make_step(lengths, pool)
    rows, before = rows_of(step), pool[:, :, LAYERS].clone()

    aux, other_aux = (torch.zeros(num_rows, len(layers) * HIDDEN, dtype=dtype) for _ in range(2))
    entries = DraftEntries(aux, w, rows, kept, pool, LAYERS)
    taps = Taps(layers, aux, entries)
    out = run_all([run], hidden.clone(), step, pool, taps)
    assert torch.equal(pool[:, :, LAYERS], before) == (LAYERS in layers)
    taps.take(LAYERS, last)
    g = entries.finish()

    other_taps = Taps(layers, other_aux)
    other = run_all([run], hidden.clone(), step, other_pool, other_taps)
    other_taps.take(LAYERS, last)
    other_g = DraftEntries(other_aux, w, rows, other_kept, other_pool, LAYERS).finish()
    for mine, peer in ((out, other), (g, other_g), (pool, other_pool), (kept, other_kept)):
        assert torch.equal(mine, peer)
    assert not torch.equal(pool[:, :, LAYERS], before)


def test_what_points_outside_is_refused_before_anything_is_written() -> None:
    fresh_seed()
    run = make_run(torch.float32, False)
    w, aux = make_head(1, torch.float32), torch.zeros(2, HIDDEN)
    pool = torch.randn(12, KV_HEADS, LAYERS + 1, 2, PAGE_SIZE, DIM)
    before = pool.clone()
    step = make_step([(2, 9)], pool)
    rows = replace(rows_of(step), token_ids=torch.tensor([0, VOCAB]))
    entries = DraftEntries(aux, w, rows, torch.zeros(SLOTS, WIDTH), pool, LAYERS)
    with pytest.raises(IndexError, match="token"):
        run_all([run], torch.randn(2, HIDDEN), step, pool, Taps((1,), aux, entries))
    assert torch.equal(pool, before)
