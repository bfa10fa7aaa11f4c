"""Rotation and cache write against float64 on fresh random inputs."""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.ops.rope.reference import rope_and_cache_reference, rotated
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import DTYPES, assert_as_exact, fresh_seed

MAX_POSITIONS = 300
EPS = 1e-6


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


def table(dim: int) -> torch.Tensor:
    angles = torch.outer(
        torch.arange(MAX_POSITIONS).double(), 1e4 ** -(torch.arange(0, dim, 2) / dim).double()
    )
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def pairs_of(dim: int, num_adjacent: int) -> list[tuple[int, int]]:
    half = dim // 2 - num_adjacent
    return [(i, i + half) if i < half else (2 * i, 2 * i + 1) for i in range(dim // 2)]


def exact_rotation(
    x: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    norm: torch.Tensor | None,
    num_adjacent: int,
) -> torch.Tensor:
    wide = x.double()
    if norm is not None:
        wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    out = torch.empty_like(wide)
    for pair, (i, k) in enumerate(pairs_of(x.shape[-1], num_adjacent)):
        c, s = cos[..., pair], sin[..., pair]
        out[..., i], out[..., k] = (
            wide[..., i] * c - wide[..., k] * s,
            wide[..., k] * c + wide[..., i] * s,
        )
    return out


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("normed", "adjacent"), [(False, 0.0), (True, 0.0), (True, 0.5), (False, 1.0)]
)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "page_size"),
    [
        (0, 2, 1, 16, 8),
        (1, 9, 3, 64, 16),
        (17, 4, 4, 80, 8),
        (33, 6, 2, 96, 32),
        (3, 8, 1, 128, 16),
        (19, 0, 3, 64, 16),
    ],
)
def test_rotates_and_stores_exactly_the_given_slots(
    rows: int,
    heads: int,
    kv_heads: int,
    dim: int,
    page_size: int,
    normed: bool,
    adjacent: float,
    dtype: torch.dtype,
) -> None:
    """All pairs halves of a head apart, or a share of them adjacent."""
    fresh_seed()
    num_adjacent = int(adjacent * dim / 2)
    layers, layer, pages = 3, 1, 9
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim).to(dtype)
    of_norms = torch.float32 if adjacent else dtype  # Weights may be finer than the rows.
    norms = [(torch.rand(dim) + 0.5).to(of_norms) if normed else None for _ in range(2)]
    positions = torch.randint(0, MAX_POSITIONS, (rows,))
    slots = torch.randperm(pages * page_size)[:rows]
    pool = torch.full((pages, kv_heads, layers, 2, page_size, dim), float("nan"), dtype=dtype)
    eager_pool, cos_sin = pool.clone(), table(dim)
    rest = (layer, slots, heads, kv_heads, *norms, EPS)
    q = rope_and_cache(qkv, positions, cos_sin, pool, *rest, num_adjacent=num_adjacent)
    eager = rope_and_cache_reference(
        qkv, positions, cos_sin, eager_pool, *rest, num_adjacent=num_adjacent
    )
    split = qkv.view(rows, heads + 2 * kv_heads, dim).split([heads, kv_heads, kv_heads], dim=1)
    assert_as_exact(q, eager, exact_rotation(split[0], cos_sin, positions, norms[0], num_adjacent))
    written, eager_written = (
        p[slots // page_size, :, layer, :, slots % page_size] for p in (pool, eager_pool)
    )
    exact_k = exact_rotation(split[1], cos_sin, positions, norms[1], num_adjacent)
    assert_as_exact(written[:, :, 0], eager_written[:, :, 0], exact_k)
    assert torch.equal(written[:, :, 1], split[2])
    pool[slots // page_size, :, layer, :, slots % page_size] = float("nan")
    assert pool.isnan().all(), "something else was written"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_adjacent", [0, 5, 12])
def test_rotates_in_place(dtype: torch.dtype, num_adjacent: int) -> None:
    """The last elements of longer vectors; the others stay."""
    fresh_seed()
    whole, positions = torch.randn(7, 3, 31).to(dtype), torch.randint(0, MAX_POSITIONS, (7,))
    before, cos_sin = whole.clone(), table(24)
    x = whole[..., 7:]
    rotated(x, cos_sin[positions], num_adjacent, out=x)
    exact = exact_rotation(before[..., 7:], cos_sin, positions, None, num_adjacent)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.double(), exact, rtol=eps, atol=32 * torch.finfo(torch.float).eps)
    assert torch.equal(whole[..., :7], before[..., :7])


def test_indices_outside_are_refused_and_nothing_is_written() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    pool = torch.zeros(2, 1, 1, 2, 8, 16)
    qkv, cos_sin = torch.randn(2, 48), table(16)
    fine = torch.tensor([0, 1])
    for bad in (-1, 16, 1 << 40):
        with pytest.raises(IndexError, match="slot"):
            rope_and_cache(qkv, fine, cos_sin, pool, 0, torch.tensor([0, bad]), 1, 1)
    for bad in (-1, MAX_POSITIONS):
        with pytest.raises(IndexError, match="position"):
            rope_and_cache(qkv, torch.tensor([bad, 0]), cos_sin, pool, 0, fine, 1, 1)
    with pytest.raises(IndexError, match="layer"):
        rope_and_cache(qkv, fine, cos_sin, pool, 1, fine, 1, 1)
    with pytest.raises(ValueError, match="adjacent"):
        rope_and_cache(qkv, fine, cos_sin, pool, 0, fine, 1, 1, num_adjacent=9)
    with pytest.raises(ValueError, match="heads"):
        rope_and_cache(qkv, fine, cos_sin, pool, 0, fine, 2, 1)
    with pytest.raises(ValueError, match="slots"):
        rope_and_cache(qkv, fine, cos_sin, pool, 0, fine.int(), 1, 1)
    assert not pool.any()
