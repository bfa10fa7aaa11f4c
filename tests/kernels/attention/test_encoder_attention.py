"""Attention in both directions on a CPU against float64: the native operations, and torch's."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from weft.kernels.ops import encoder_attention as kernels
from weft.kernels.ops.encoder_attention import encoder_attention
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.testing.kernels.kernel_checks import fresh_seed

ERRORS = {torch.float32: 3e-5, torch.bfloat16: 4e-2}


def exact(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: list[int], reach: int | None
) -> torch.Tensor:
    """Sequence by sequence and with the whole matrix of scores, in float64."""
    group, found = q.shape[1] // k.shape[1], []
    for first, end in pairwise(bounds):
        own_q, own_k, own_v = (x[first:end].double().transpose(0, 1) for x in (q, k, v))
        own_k, own_v = (x.repeat_interleave(group, 0) for x in (own_k, own_v))
        at = torch.arange(end - first)
        scores = own_q @ own_k.transpose(1, 2) * 0.2
        if reach is not None:
            scores.masked_fill_((at[:, None] - at).abs() > reach, float("-inf"))
        found.append((scores.softmax(-1) @ own_v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("dtype", ERRORS)
def test_each_row_attends_to_its_own_sequence(
    dtype: torch.dtype, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    if not is_native:
        monkeypatch.setattr(kernels, "native_for", lambda *given: None)
    for _ in range(6):
        dim, kv_heads = random.choice((12, 24, 64, 96, 128)), random.choice((1, 2, 4))
        lengths = random.choices((1, 2, 31, 64, 65, 97, 130, 250), k=5)
        bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        qkv = torch.randn(bounds[-1], 4 + 2 * kv_heads, dim).to(dtype)
        q, k, v = qkv.split([4, kv_heads, kv_heads], dim=1)
        assert (kernels.native_for(q, k, v, None) is not None) == is_native
        reach = random.choice((None, 0, 9, 63, 200))
        given = (reach, None, 0.2)
        found = encoder_attention(
            q, k, v, Bounds.of(torch.tensor(bounds, dtype=torch.int32)), *given
        )
        assert (found - exact(q, k, v, bounds, reach)).abs().max() < ERRORS[dtype]
        number = random.randrange(len(lengths))
        own = slice(bounds[number], bounds[number + 1])
        alone = Bounds.of(torch.tensor([0, lengths[number]], dtype=torch.int32))
        again = encoder_attention(q[own], k[own], v[own], alone, *given)
        assert torch.equal(again, found[own])


@pytest.mark.parametrize("is_native", [True, False])
def test_empty_sequences_and_padding_change_no_bit(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    if not is_native:
        monkeypatch.setattr(kernels, "native_for", lambda *given: None)
    rows, padding = random.randint(2, 90), random.randint(1, 40)
    begin = random.randint(1, rows - 1)
    whole = torch.randn(rows + padding, 3, 2, 8)
    whole[rows:] = float("nan")
    bounds = torch.tensor([0, begin, rows], dtype=torch.int32)
    wanted = encoder_attention(*whole[:rows].unbind(1), Bounds.of(bounds))
    padded = torch.cat((bounds, bounds[-1:].expand(random.randint(1, 4))))
    found = encoder_attention(*whole.unbind(1), Bounds.of(padded))
    assert torch.equal(found[:rows], wanted)


@pytest.mark.parametrize("is_native", [True, False])
def test_bounds_that_do_not_fit_are_refused(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    if not is_native:
        monkeypatch.setattr(kernels, "native_for", lambda *given: None)
    qkv = torch.randn(9, 3, 2, 8).unbind(1)
    for bounds in ([0, 10], [1, 9], [0, 7, 5, 9], []):
        with pytest.raises(ValueError, match="sequence"):
            encoder_attention(*qkv, Bounds.of(torch.tensor(bounds, dtype=torch.int32)))
    right = torch.tensor([0, 4, 9])
    for wrong in (Bounds.of(right), Bounds(right[:2].int(), right.tolist())):
        with pytest.raises(ValueError, match="bounds of sequences"):
            encoder_attention(*qkv, wrong)
