"""Attention of rows that form trees, against float64 and what each row may see.

What no row may see is NaN, and leaves are so loud that a row that hears another's leaf is wrong.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.attention import cpu as attention_cpu
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention import reference as attention_reference
from weft.kernels.shared import cpu
from weft.testing.kernels import tree_cases
from weft.testing.kernels.attention_cases import LAYER, Geometry, hide_first, in_parts
from weft.testing.kernels.gpu_kernels import PoisonedTorch
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed, mutated_native_cpu
from weft.testing.kernels.tree_cases import (
    TreeCase,
    Work,
    assert_trees,
    hide_unseen,
    make_tree_case,
)


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_cpu, attention_reference):
        monkeypatch.setattr(module, "torch", PoisonedTorch())
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


def attend(tree: TreeCase, window: int | None = None, first_position: int = 0) -> torch.Tensor:
    """The front."""
    case = tree.case
    return in_parts(paged_attention)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        first_position=first_position,
        window=window,
        ancestors=tree.ancestors,
        earlier_rows=tree.earlier,
    )


def check(tree: TreeCase, window: int | None = None, first_position: int = 0) -> None:
    assert_trees(attend(tree, window, first_position), tree, window, first_position)


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
    lengths = [4, *(random.randrange(1, 5) for _ in range(11))]
    work = [Work(n, earlier + n + random.randrange(1, 600), True, earlier) for n in lengths]
    tree = make_tree_case(Geometry(4, 2, 24, 16), work, dtype)
    hide_first(tree.case, 1)
    check(tree, None, 1)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
def test_chains_are_as_without_words(dtype: torch.dtype) -> None:
    """To the bit, whichever way a chain is written."""
    fresh_seed()
    work = [Work(5, 200), Work(1, 300), Work(90, 90), Work(31, 600)]
    tree = make_tree_case(Geometry(6, 2, 64, 16), work, dtype)
    case = tree.case
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 90, 600)
    assert torch.equal(attend(tree), in_parts(paged_attention)(case.q, case.pool, LAYER, *lengths))


def test_what_cannot_be_a_tree_is_refused() -> None:
    tree = make_tree_case(Geometry(4, 2, 16, 8), [Work(4, 40, is_tree=True)], torch.float32)
    with pytest.raises(ValueError, match="window of 32"):
        attend(tree, window=32)
    for words in (tree.ancestors.int(), tree.ancestors[:3], tree.ancestors.repeat(2)[::2]):
        with pytest.raises(ValueError, match="ancestors"):
            attend(tree._replace(ancestors=words))
    with pytest.raises(ValueError, match="29 rows before 4"):
        attend(tree._replace(earlier=29))


@pytest.mark.full
@pytest.mark.parametrize(
    ("header", "original", "replacement"),
    [
        ("attention.h", "if (!sees_row(word, begin + i - t->root))", "if (0)"),
        ("attention_plan.h", "word >> (row < 63 ? row : 63) & 1", "row != 5"),
        ("attention.h", "at = position_of(t, row / t->group);",
         "at = t->first_position + row / t->group;"),
        ("attention_plan.h", "if (of_row < position) position = of_row;", ""),
        ("attention_plan.h", "- q_rows - a->earlier_rows", "- q_rows"),
    ],
)  # fmt: skip
def test_the_check_sees_a_mutation(
    header: str, original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    native = mutated_native_cpu(tmp_path, header, original, replacement)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    work = [Work(24, 400, is_tree=True, earlier=6), Work(20, 90, is_tree=True, earlier=6)]
    # A chain and a star have the most and the fewest ancestors.
    shapes = [list(range(-1, 29)), [-1] + [0] * 25]
    monkeypatch.setattr(tree_cases, "random_parents", lambda count: shapes.pop(0))
    tree = make_tree_case(Geometry(6, 2, 64, 16), work, torch.float32)
    hide_unseen(tree, 43)
    with pytest.raises(AssertionError):
        check(tree, 43)
