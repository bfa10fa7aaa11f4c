"""A layer of latent attention and shared experts as a GPU runs it, by Triton's interpreter."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial

import pytest
import torch
from weft.checkpoint.latent_config import LatentConfig
from weft.engine.model.layers import latent
from weft.engine.model.layers.latent import LatentAttention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.layers.moe import SparseMLP
from weft.engine.model.layers.rotary import Rotary
from weft.engine.model.stack import Run, run_all
from weft.kernels.ops.latent_attention.reference import (
    earlier_attention_reference,
    own_attention_reference,
)
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.moe.spec import ExpertWeights, RouterForm, SparseMlpWeight
from weft.kernels.ops.norm import Norm
from weft.testing.kernels.as_on_gpu import as_on_gpu
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.layer_cases import HIDDEN, PAGE_SIZE, draw, make_cos_sin, make_step
from weft.testing.kernels.near_ties import draw_clear

pytestmark = pytest.mark.needs("triton-interpreter")

SIZES = LatentConfig(q_rank=40, kv_rank=32, nope_dim=24, rope_dim=16, value_dim=20)
HEADS, EXPERTS, INNER = 5, 6, 44


def plain(weight: torch.Tensor, *, gated: bool = False) -> LinearWeight:
    return LinearWeight(*weight.shape, weight.dtype, gated, PlainForm(weight), None)


class Weights:
    """Random weights of two layers."""

    def __init__(self) -> None:
        head, rank = SIZES.nope_dim + SIZES.rope_dim, SIZES.kv_rank
        self.down = draw(40 + rank + SIZES.rope_dim, HIDDEN, dtype=torch.float32)
        self.q = draw(HEADS * head, 40, dtype=torch.float32)
        self.to_keys = draw(HEADS, SIZES.nope_dim, rank, dtype=torch.float32)
        self.to_values = draw(HEADS, rank, SIZES.value_dim, dtype=torch.float32)
        self.o = draw(HIDDEN, HEADS * SIZES.value_dim, dtype=torch.float32)
        self.router = draw(EXPERTS, HIDDEN, dtype=torch.float32)
        self.w13 = draw(EXPERTS, 2 * INNER, HIDDEN, dtype=torch.float32)
        self.w2 = draw(EXPERTS, HIDDEN, INNER, dtype=torch.float32)
        self.correction = 0.3 * torch.randn(EXPERTS)

    def layer(self, index: int, dtype: torch.dtype, *, is_stacked: bool) -> Layer:
        def norm(size: int) -> Norm:
            return Norm(torch.ones(size, dtype=dtype), 1e-5)

        mixer = LatentAttention(
            SIZES,
            index,
            Rotary(make_cos_sin(SIZES.rope_dim), SIZES.rope_dim // 2),
            0.2,
            down_proj=plain(self.down.to(dtype)),
            q_norm=norm(40),
            q_proj=plain(self.q.to(dtype)),
            kv_norm=norm(SIZES.kv_rank),
            absorbed=(self.to_keys.to(dtype), self.to_values.to(dtype)),
            o_proj=plain(self.o.to(dtype)),
        )
        w13, w2 = self.w13.to(dtype), self.w2.to(dtype)
        experts = ExpertWeights(
            HIDDEN,
            INNER,
            dtype,
            () if is_stacked else tuple(plain(w, gated=True) for w in w13),
            () if is_stacked else tuple(plain(w) for w in w2),
            (w13, w2) if is_stacked else None,
            None,
        )
        form = RouterForm(
            is_sigmoid=True,
            correction=self.correction,
            groups=3,
            kept_groups=2,
            summed=2,
            scale=2.5,
        )
        weight = SparseMlpWeight(plain(self.router.to(dtype)), experts, 3, True, form)
        shared = GatedMLP(index, plain(w13[0].contiguous(), gated=True), plain(w2[0].contiguous()))
        return Layer(index, norm(HIDDEN), mixer, norm(HIDDEN), SparseMLP(index, weight, shared))


@pytest.mark.parametrize("lengths", [[(1, 9)], [(1, 30), (12, 20)]])
def test_layers_of_latent_attention(lengths: list[tuple[int, int]]) -> None:
    fresh_seed()
    rows, pages = sum(q for q, _ in lengths), len(lengths) * 4
    pool = torch.randn(pages, 1, 2, 1, PAGE_SIZE, SIZES.kv_rank + SIZES.rope_dim).half()
    hidden = torch.randn(rows, HIDDEN).half()

    def run(weights: Weights, dtype: torch.dtype, *, on_gpu: bool) -> torch.Tensor:
        """The result beside what the pool has of the layers."""
        kv, given = pool.to(dtype, copy=True), hidden.to(dtype, copy=True)
        layers = [weights.layer(index, dtype, is_stacked=on_gpu) for index in range(2)]
        step = make_step(lengths, kv)
        with as_on_gpu() if on_gpu else contextlib.nullcontext():
            out = run_all([Run(layers)], given, step, kv)
        return torch.cat([out.flatten(), kv.flatten()])

    weights = draw_clear(Weights, lambda drawn: run(drawn, torch.float64, on_gpu=False))
    out, peer = (run(weights, torch.float32, on_gpu=on_gpu) for on_gpu in (True, False))
    exact = run(weights, torch.float64, on_gpu=False)
    assert_as_exact(out, peer, exact, slack=1e-4)


@pytest.mark.parametrize(
    ("lengths", "num_earlier"),
    [
        ([(1, 30), (12, 20), (9, 9)], None),
        ([(1, 30), (12, 12), (9, 9), (1, 1)], 0),
        ([(1, 30), (12, 30), (9, 9), (1, 1), (5, 30)], 43),
    ],
)
def test_prompts_by_heads(
    lengths: list[tuple[int, int]], num_earlier: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows by keys and values of heads, also of what is before: the same, on a CPU and by the GPU's
    kernels.
    """
    fresh_seed()
    monkeypatch.setattr(latent, "own_attention", own_attention_reference)
    monkeypatch.setattr(latent, "earlier_attention", earlier_attention_reference)
    pool = torch.randn(len(lengths) * 4, 1, 2, 1, PAGE_SIZE, SIZES.kv_rank + SIZES.rope_dim)
    hidden = torch.randn(sum(q for q, _ in lengths), HIDDEN)

    def run(weights: Weights, dtype: torch.dtype, *, by_heads: bool, on_gpu: bool) -> torch.Tensor:
        monkeypatch.setattr(latent, "is_faster_uncompressed", lambda *_: by_heads)
        kv, given = pool.to(dtype, copy=True), hidden.to(dtype, copy=True)
        layers = [weights.layer(index, dtype, is_stacked=on_gpu) for index in range(2)]
        step = make_step(lengths, kv)
        # A request of padding, which has no rows.
        group = step.groups[0]
        more = group._replace(
            page_table=torch.cat([group.page_table, group.page_table[:1]]),
            cu_q_lens=torch.cat([group.cu_q_lens, group.cu_q_lens[-1:]]),
            kv_lens=torch.cat([group.kv_lens, group.kv_lens[:1]]),
            is_cold=num_earlier == 0,
            num_earlier=num_earlier,
        )
        with as_on_gpu() if on_gpu else contextlib.nullcontext():
            return run_all([Run(layers)], given, replace(step, groups=(more,)), kv)

    in_latents = partial(run, by_heads=False)
    weights = draw_clear(Weights, lambda drawn: in_latents(drawn, torch.float64, on_gpu=False))
    exact = in_latents(weights, torch.float64, on_gpu=False)
    peer = in_latents(weights, torch.float32, on_gpu=True)
    for on_gpu in (False, True):
        out = run(weights, torch.float32, by_heads=True, on_gpu=on_gpu)
        assert_as_exact(out, peer, exact, slack=1e-4)


def test_positions_before_are_found_only_for_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer = Weights().layer(0, torch.float32, is_stacked=False).mixer
    pool = torch.randn(4, 1, 2, 1, PAGE_SIZE, SIZES.kv_rank + SIZES.rope_dim)
    step = make_step([(12, 30)], pool)
    step = replace(step, groups=(step.groups[0]._replace(num_earlier=18),))
    for by_heads in (False, True):
        monkeypatch.setattr(latent, "is_faster_uncompressed", lambda *_, given=by_heads: given)
        assert (mixer.prepare(step, 12, pool).groups[0].earlier is not None) == by_heads


def test_a_single_row_keeps_its_precision_beside_whole_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a step that is not cold, where no row is added to another."""
    fresh_seed()
    monkeypatch.setattr(latent, "own_attention", own_attention_reference)
    dtype, lengths = torch.bfloat16, [(1, 30), (12, 12)]
    mixer = Weights().layer(0, dtype, is_stacked=False).mixer
    assert isinstance(mixer, LatentAttention)
    pool = torch.randn(8, 1, 2, 1, PAGE_SIZE, SIZES.kv_rank + SIZES.rope_dim).to(dtype)
    group = make_step(lengths, pool).groups[0]
    # Its own position weighs little, and its values are large.
    pool.view(8, 2, PAGE_SIZE, -1)[
        group.places[0] // PAGE_SIZE, :, group.places[0] % PAGE_SIZE
    ] *= 64
    q = (0.001 * torch.randn(13, HEADS, SIZES.nope_dim + SIZES.rope_dim)).to(dtype)
    cold, warm = (
        mixer._by_heads(q, group._replace(is_cold=is_cold), pool) for is_cold in (True, False)
    )
    torch.testing.assert_close(cold[0], warm[0], rtol=2**-6, atol=0.01)
    assert torch.equal(cold[1:], warm[1:])
