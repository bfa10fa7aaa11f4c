"""Attention of trees by the GPU's kernels, in Triton's interpreter, against float64."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.attention import gpu as gpu_attention
from weft.testing.kernels import tree_cases
from weft.testing.kernels.attention_cases import (
    LAYER,
    Geometry,
    decode_rows,
    hide_first,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import fresh_seed
from weft.testing.kernels.tree_cases import (
    TreeCase,
    Work,
    assert_trees,
    hide_unseen,
    make_tree_case,
)

pytestmark = pytest.mark.needs("triton-interpreter")


def decode(
    module: ModuleType,
    tree: TreeCase,
    window: int | None = None,
    first_position: int = 0,
    max_rows: int = 32,
) -> torch.Tensor:
    case = tree.case
    return decode_rows(
        module,
        case,
        1000,
        is_uniform=False,
        first_position=first_position,
        max_rows=max_rows,
        window=window,
        ancestors=tree.ancestors,
        earlier_rows=tree.earlier,
    )


def some_trees() -> list[Work]:
    """Beside a decode, a chain, a prompt, and requests that bring or have nothing."""
    work = [
        Work(32, 32 + random.randrange(1, 100), is_tree=True),
        Work(random.randrange(2, 12), 150, is_tree=True),
        Work(3, 3, is_tree=True),
        Work(1, 70),
        Work(4, 40),
        Work(33, 33),
        Work(0, 6),
        Work(0, 0),
    ]
    random.shuffle(work)
    return work


@pytest.mark.parametrize(
    ("geometry", "dtype", "splits"),
    [
        (Geometry(4, 2, 24, 16), torch.float16, 1),
        (Geometry(2, 2, 24, 16), torch.float16, None),
        # A group whose rows take several programs; sizes that are no power of two.
        (Geometry(7, 1, 16, 32), torch.float16, 1),
        (Geometry(3, 1, 40, 16), torch.float32, 1),
        (Geometry(1, 1, 40, 16), torch.float32, 3),
    ],
)
def test_trees(
    geometry: Geometry,
    dtype: torch.dtype,
    splits: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fresh_seed()
    tree = make_tree_case(geometry, some_trees(), dtype)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        if splits is not None:
            monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        assert_trees(decode(module, tree), tree, max_rows=32)


@pytest.mark.parametrize("max_rows", [2, 8, 16])
def test_trees_of_fewer_rows(max_rows: int, tmp_path: Path) -> None:
    fresh_seed()
    work = [Work(n, 70, is_tree=True) for n in (max_rows, 1, max_rows - 1, max_rows + 1)]
    tree = make_tree_case(Geometry(2, 1, 24, 16), work, torch.float16)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        assert_trees(decode(module, tree, max_rows=max_rows), tree, max_rows=max_rows)


@pytest.mark.parametrize("window", [33, 70, 5000])
def test_a_window_counts_from_the_position(window: int, tmp_path: Path) -> None:
    fresh_seed()
    tree = make_tree_case(Geometry(2, 1, 24, 16), some_trees(), torch.float16)
    hide_unseen(tree, window)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        assert_trees(decode(module, tree, window), tree, window, max_rows=32)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_tree_goes_on_from_earlier_rows(
    dtype: torch.dtype, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it grows while it is drafted, with nothing at the first position."""
    fresh_seed()
    earlier = random.randrange(1, 29)
    work = [Work(n, earlier + n + random.randrange(1, 200), True, earlier) for n in (4, 1, 3)]
    tree = make_tree_case(Geometry(2, 1, 24, 16), work, dtype)
    hide_first(tree.case, 1)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        assert_trees(decode(module, tree, None, 1, max_rows=4), tree, None, 1)


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_at_positions_that_are_not_seen_are_zero(
    splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    tree = make_tree_case(Geometry(4, 2, 24, 16), [Work(4, 5), Work(3, 90)], torch.float16)
    hide_first(tree.case, 3)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        out = decode(module, tree, None, 3, max_rows=4)
    assert not out[:2].any()
    assert_trees(out, tree, None, 3)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_long_chains_without_words(
    dtype: torch.dtype, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rows than chains have had: of a few requests, or of some among many."""
    fresh_seed()
    work = [Work(32, 150), Work(0, 0), Work(9, 17), Work(1, 90), Work(33, 33), Work(0, 0)]
    tree = make_tree_case(Geometry(1, 1, 16, 16), work, dtype)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        assert_trees(decode(module, tree._replace(ancestors=None)), tree, max_rows=32)


@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("most", [12, 33, 40])
def test_a_whole_step(most: int, has_own: bool) -> None:
    """Of trees alone, and with a prompt."""
    fresh_seed()
    work = [Work(9, 50, is_tree=True), Work(1, 33), Work(most, 60, is_tree=most == 12)]
    tree = make_tree_case(Geometry(1, 1, 16, 16), work, torch.float16)
    case = tree.case
    own = None
    if has_own:
        own, case = gpu_attention.OwnKv(*case.own_kv()), hide_own_pages(case, least_rows=33)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, most, 100)
    out = in_parts(gpu_attention.paged_attention)(
        case.q, case.pool, LAYER, *lengths, own=own, ancestors=tree.ancestors
    )
    assert_trees(out, tree)


def test_what_no_kernel_does_is_refused(tmp_path: Path) -> None:
    case = make_case(Geometry(2, 1, 16, 16), [(2, 40)], torch.float16)
    words = torch.full((2,), -1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 2, 40)
    with pytest.raises(ValueError, match="draft chains"):
        in_parts(gpu_attention.paged_attention)(
            case.q, case.pool, LAYER, *lengths, is_fixed=True, ancestors=words
        )
    with pytest.raises(ValueError, match="earlier rows"):
        in_parts(gpu_attention.paged_attention)(
            case.q, case.pool, LAYER, *lengths, window=40, ancestors=words, earlier_rows=1
        )


@pytest.mark.full_after(2)
@pytest.mark.parametrize(
    "change",
    [
        ("words[:, None] >> (of_tree & 31)[None, :]", "-1 - 0 * of_tree[None, :]"),
        ("(of_tree >= 0)[None, :] & ", ""),
        ("root -= earlier_rows", "root -= 0"),
        ("if start + FORM.tile > root:", "if start > root:"),
        ("at = root + _depth(words, last_seen - root)", "at = last_seen"),
        ("bits = words & ((1 << (row & 31)) - 1)", "bits = words"),
        ("block = request % (ROWS // BLOCK_ROWS) * BLOCK_ROWS", "block = 0"),
        ("is_behind = tl.load(cu_q_lens + middle) > row",
         "is_behind = tl.load(cu_q_lens + middle) >= row"),
    ],
)  # fmt: skip
def test_the_checks_see_a_mutation(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chain and a star have the most and the fewest ancestors.
    shapes = [list(range(-1, 11)), [-1] + [0] * 11]
    # Rows with children, whose own V is not loud, far behind their depth.
    shapes += [[-1, 0, 0, 0, 0, 0, 0, 0, 5, 6, 7, 10]] * 2
    monkeypatch.setattr(tree_cases, "random_parents", lambda count: shapes.pop(0))
    earlier = 6 if "earlier" in change[0] else 0
    # Only with a window does a depth count, and only without one are tiles alike to all rows.
    window = 43 if "_depth" in change[0] or "bits" in change[0] else None
    work = [Work(12 - earlier, kv_len, True, earlier) for kv_len in (140, 70, 80, 90)]
    tree = make_tree_case(Geometry(2, 1, 16, 16), work, torch.float16)
    hide_unseen(tree, window)
    with kernel_module("attention.triton_decode", tmp_path, change) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: 2)
        monkeypatch.setattr(module, "_BLOCK_MEMBERS", 16)
        out = decode(module, tree, window)
    with pytest.raises(AssertionError):
        assert_trees(out, tree, window)
