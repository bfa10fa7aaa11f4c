"""Comparisons of rotation, greedy choice and router with references see a wrong kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.moe.reference import route_reference
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.near_ties import clear_logits

pytestmark = pytest.mark.needs("triton-interpreter")

EPS = 1e-5


def check_rope(module: ModuleType) -> None:
    """11 heads, which is more than a program takes, with norms."""
    heads, kv_heads, dim, page_size = 7, 2, 24, 8
    qkv = torch.randn(5, (heads + 2 * kv_heads) * dim)
    positions, cos_sin = torch.randint(1, 50, (5,)), torch.randn(50, dim)
    q_norm, k_norm = torch.rand(2, dim) + 0.5
    slots = torch.randperm(4 * page_size)[:5]
    pool = torch.full((4, kv_heads, 3, 2, page_size, dim), float("nan"))
    eager_pool, exact_pool = pool.clone(), pool.double()
    rest = (slots, heads, kv_heads, q_norm, k_norm, EPS)
    eager = rope_and_cache_reference(qkv, positions, cos_sin, eager_pool, 1, *rest)
    exact = rope_and_cache_reference(
        qkv.double(), positions, cos_sin.double(), exact_pool, 1, *rest
    )
    q = module.rope_and_cache(qkv, positions, cos_sin, pool, 1, slots, heads, q_norm, k_norm, EPS)
    assert_as_exact(q, eager, exact)
    written = ~exact_pool.isnan()
    assert torch.equal(written, ~pool.isnan())
    assert_as_exact(pool[written], eager_pool[written], exact_pool[written])


def check_greedy(module: ModuleType) -> None:
    """One tile and three, of which the last is not full; equals; what is not finite."""
    for size in (5000, 9000):
        logits = torch.randn(6, size)
        logits[0, [70, 80]] = logits[1, [90, 4500]] = logits[2, size - 1] = 9.0
        logits[3, 4321], logits[4, 7] = float("nan"), float("inf")
        tokens = module.greedy_rows(logits)
        assert tokens.tolist() == [70, 90, size - 1, -1, -1, int(logits[5].argmax())]


def check_route(module: ModuleType) -> None:
    """A number of experts that fills no block."""
    for renormalise in (False, True):
        logits = clear_logits(9, 21, 4, spread=3.0)
        logits[5:] -= 20
        exact = route_reference(logits.double(), 4, renormalise=renormalise)
        ids, shares = module.route(logits, 4, renormalise)
        assert torch.equal(ids, exact.ids)
        torch.testing.assert_close(shares, exact.weights.float(), rtol=1e-5, atol=1e-7)


CHECKS: dict[str, Callable[[ModuleType], None]] = {
    "rope.triton_rope": check_rope,
    "greedy.triton_rows": check_greedy,
    "moe.triton_route": check_route,
}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rope.triton_rope", None),
        ("rope.triton_rope",
         ("cache_kernel[(rows, cdiv(heads, ", "cache_kernel[(rows, (heads // ")),
        ("rope.triton_rope", ("normed_high * cos + normed_low", "normed_high * cos - normed_low")),
        ("rope.triton_rope", ("* PAGE_SIZE + slot % PAGE_SIZE", "* PAGE_SIZE")),
        ("rope.triton_rope", ("column < HALF\n    if", "column < HALF - 4\n    if")),
        ("greedy.triton_rows", None),
        ("greedy.triton_rows", ("tiles = cdiv(vocab_size, _TILE)", "tiles = vocab_size // _TILE")),
        ("greedy.triton_rows", ("mask = column < vocab_size", "mask = column < vocab_size - 8")),
        ("greedy.triton_rows",
         ("first = tl.min(tl.where(value == best, token, 2147483647), axis=0)",
          "first = tl.max(tl.where(value == best, token, 0), axis=0)")),
        ("greedy.triton_rows", ("tl.where(num_bad > 0, -1, token)", "token")),
        ("moe.triton_route", None),
        ("moe.triton_route", ("for _ in range(TOP_K):", "for _ in range(TOP_K - 1):")),
        ("moe.triton_route", ("exists = expert < experts", "exists = expert < experts - 8")),
        ("moe.triton_route", ("if RENORMALISE else power", "if not RENORMALISE else power")),
        ("moe.triton_route", ("bits ^ ((bits >> 31) & 0x7FFFFFFF)", "bits")),
    ],
)  # fmt: skip
@pytest.mark.full
def test_the_checks_see_a_mutation(
    name: str, change: tuple[str, str] | None, tmp_path: Path
) -> None:
    fresh_seed()
    with kernel_module(name, tmp_path, change) as module:
        if change is None:
            CHECKS[name](module)
            return
        with pytest.raises(AssertionError):
            CHECKS[name](module)
