"""Attention in both directions on a GPU, by Triton's interpreter, against float64."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.rope.reference import rotated
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")


def exact(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    reach: int | None,
    slopes: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Sequence by sequence and with the whole matrix of scores, in float64."""
    group, found = q.shape[1] // k.shape[1], []
    for first, end in pairwise(bounds):
        own_q, own_k, own_v = (x[first:end].double().transpose(0, 1) for x in (q, k, v))
        own_k, own_v = (x.repeat_interleave(group, 0) for x in (own_k, own_v))
        at = torch.arange(end - first)
        distance = (at[:, None] - at).abs()
        scores = own_q @ own_k.transpose(1, 2) * scale
        if slopes is not None:
            scores -= slopes.double()[:, None, None] * distance
        if reach is not None:
            scores.masked_fill_(distance > reach, float("-inf"))
        found.append((scores.softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize(
    ("dtype", "dim", "kv_heads", "has_slopes"),
    [
        (torch.float32, 24, 4, True),
        (torch.float16, 64, 2, False),
        (torch.float16, 72, 4, False),
        (torch.float16, 80, 1, True),
        (torch.float32, 88, 2, False),
        (torch.float16, 128, 1, False),
    ],
)
@pytest.mark.parametrize("reach", [None, 9])
def test_each_row_attends_to_its_own_sequence(
    tmp_path: Path, dtype: torch.dtype, dim: int, kv_heads: int, has_slopes: bool, reach: int | None
) -> None:
    fresh_seed()
    heads, lengths = 4, [random.choice((1, 2, 31, 65, 130)) for _ in range(4)]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    rows = bounds[-1] + random.randrange(70)  # The last ones are padding.
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    qkv[bounds[-1] :] = float("nan")
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    slopes = torch.rand(heads) if has_slopes else None
    # Sequences of padding have no rows.
    cu_lens = torch.tensor([*bounds, *bounds[-1:] * random.randrange(3)], dtype=torch.int32)
    with kernel_module("encoder_attention.triton_ragged", tmp_path) as module:
        given = (reach, slopes, 0.2)
        found = module.encoder_attention(q, k, v, cu_lens, *given)[: bounds[-1]]
        wanted = exact(q, k, v, bounds, *given)
        least = {torch.float32: 1e-5, torch.float16: 5e-3}[dtype]
        assert (found - wanted).abs().max() < least
        number = random.randrange(4)
        own = slice(bounds[number], bounds[number + 1])
        alone = torch.tensor([0, lengths[number]], dtype=torch.int32)
        again = module.encoder_attention(q[own], k[own], v[own], alone, *given)
    if dtype != torch.float32:  # The interpreter's products in float32 are numpy's.
        assert torch.equal(found[own], again)


def test_a_layer_norm_takes_the_sum(tmp_path: Path) -> None:
    fresh_seed()
    width, ulp = random.choice((random.randint(1, 8), random.randint(9, 90))), 2.0**-23
    x, residual = torch.randn(2, 7, width)
    weight, bias = torch.randn(2, x.shape[1])
    with kernel_module("norm.triton_layer", tmp_path) as module:
        for added in (bias, None):
            found = module.add_layer_norm(x, residual, weight, added, 1e-5)
            total = (x + residual).double()
            less = total - total.mean(1, keepdim=True)
            spread = (less.square().mean(1, keepdim=True) + 1e-5).sqrt()
            unit = less / spread
            wanted = unit * weight + (0 if added is None else added)
            # Rounding of the mean counts for more, the nearer the numbers of a row are together.
            mean_error = (4 + width) * ulp * total.abs().amax(1, keepdim=True)
            allowed = ((1 + unit.abs()) * mean_error / spread + 8 * ulp * unit.abs()) * weight.abs()
            assert bool(((found - wanted).abs() <= allowed + 2 * ulp * wanted.abs()).all())


def test_heads_are_rotated_in_place(tmp_path: Path) -> None:
    fresh_seed()
    heads, dim, positions = random.randint(1, 20), 2 * random.randint(1, 20), torch.randperm(30)[:5]
    x, cos_sin = torch.randn(5, heads + 3, dim), torch.randn(30, dim)
    wanted = rotated(x[:, :heads].double(), cos_sin[positions])
    rest = x[:, heads:].clone()
    with kernel_module("rope.triton_rope", tmp_path) as module:
        module.rotate_heads(x[:, :heads], positions, cos_sin)
    assert (x[:, :heads] - wanted).abs().max() < 1e-5
    assert torch.equal(x[:, heads:], rest)
