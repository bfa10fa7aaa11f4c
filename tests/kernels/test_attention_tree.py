"""Attention of rows that form trees, against float64 and what each row may see.

What no row may see is NaN, and leaves are so loud that a row that hears another's leaf is wrong.
"""

from __future__ import annotations

import random

import pytest
import torch
from attention_cases import LAYER, Geometry, hide_first
from gpu_kernels import PoisonedTorch
from kernel_checks import DTYPES, assert_as_exact, fresh_seed
from tree_cases import TreeCase, Work, eager_trees, exact_trees, hide_unseen, make_tree_case
from weft.kernels import attention, cpu
from weft.kernels.attention import paged_attention


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "torch", PoisonedTorch())
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


def attend(tree: TreeCase, window: int | None = None, first_position: int = 0) -> torch.Tensor:
    """The front."""
    case = tree.case
    return paged_attention(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        first_position,
        window=window,
        ancestors=tree.ancestors,
        earlier_rows=tree.earlier,
    )


def check(tree: TreeCase, window: int | None = None, first_position: int = 0) -> None:
    out = attend(tree, window, first_position)
    peer = eager_trees(tree, window, first_position)
    exact = exact_trees(tree, window, first_position)
    for rows in (tree.is_loud, ~tree.is_loud):
        assert_as_exact(out[rows], peer[rows], exact[rows])


def mixed_work() -> list[Work]:
    """Trees of all sizes beside decodes, chains, prompts and requests without rows."""
    work = [
        Work(32, 32 + random.randrange(1, 20), is_tree=True),
        Work(16, 700, is_tree=True),
        Work(random.randrange(2, 32), 1100, is_tree=True),
        Work(7, 7, is_tree=True),
        Work(1, 90, is_tree=True),
        Work(1, 1),
        Work(1, 600),
        Work(6, 64),
        Work(0, 12),
        Work(140, 300),
    ]
    random.shuffle(work)
    return work


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("geometry", [Geometry(9, 3, 64, 16), Geometry(8, 1, 24, 8)])
def test_rows_attend_to_their_ancestors(geometry: Geometry, dtype: torch.dtype) -> None:
    fresh_seed()
    check(make_tree_case(geometry, mixed_work(), dtype))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("window", [33, 100, 515, 5000])
def test_a_window_counts_from_the_position(window: int) -> None:
    fresh_seed()
    tree = make_tree_case(Geometry(4, 2, 24, 16), mixed_work(), random.choice(DTYPES))
    hide_unseen(tree, window)
    check(tree, window)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tree_goes_on_from_earlier_rows(dtype: torch.dtype) -> None:
    """As it grows level by level while it is drafted, with nothing at the first position."""
    fresh_seed()
    earlier = random.randrange(1, 29)
    lengths = [4, *(random.randrange(1, 5) for _ in range(3))]
    work = [Work(n, earlier + n + random.randrange(1, 600), True, earlier) for n in lengths]
    tree = make_tree_case(Geometry(4, 2, 24, 16), work, dtype)
    hide_first(tree.case, 1)
    check(tree, None, 1)


def test_what_cannot_be_a_tree_is_refused() -> None:
    tree = make_tree_case(Geometry(4, 2, 16, 8), [Work(4, 40, is_tree=True)], torch.float32)
    with pytest.raises(ValueError, match="window of 32"):
        attend(tree, window=32)
    for words in (tree.ancestors.int(), tree.ancestors[:3], tree.ancestors.repeat(2)[::2]):
        with pytest.raises(ValueError, match="ancestors"):
            attend(tree._replace(ancestors=words))
    with pytest.raises(ValueError, match="29 rows before 4"):
        attend(tree._replace(earlier=29))
