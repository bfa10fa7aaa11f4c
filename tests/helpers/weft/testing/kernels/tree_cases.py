"""Random steps whose requests bring trees of rows, and what each row sees of them."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.testing.kernels.attention_cases import LAYER, Case, Geometry, in_parts, make_case
from weft.testing.kernels.kernel_checks import assert_as_exact

LOUD = 1e4
"""Factor on V of leaves, which nobody but they themselves may see."""


def random_parents(count: int) -> list[int]:
    """A tree of rows, parents before children: of any shape, a chain or a star."""
    kind = random.choice(["any", "any", "chain", "star", "bush"])
    if kind == "chain":
        return list(range(-1, count - 1))
    if kind == "star":
        return [-1] + [0] * (count - 1)
    if kind == "bush":
        return [-1] + [(row - 1) // 4 for row in range(1, count)]
    return [-1] + [random.randrange(row) for row in range(1, count)]


def path_to(parents: list[int], row: int) -> list[int]:
    """The row and its ancestors, the root first."""
    path = [row]
    while parents[path[-1]] >= 0:
        path.append(parents[path[-1]])
    return path[::-1]


def words_of(parents: list[int]) -> list[int]:
    """Word of `ancestors` for each row."""
    return [sum(1 << seen for seen in path_to(parents, row)) for row in range(len(parents))]


class Work(NamedTuple):
    """The rows of a request."""

    q_len: int
    kv_len: int
    is_tree: bool = False
    earlier: int = 0
    """Rows of its tree that are in the pages already."""


class TreeCase(NamedTuple):
    """A case, its words, and what they mean."""

    case: Case
    ancestors: torch.Tensor
    """[T] int64."""
    visible: list[torch.Tensor]
    """Positions that each row sees, without a window."""
    positions: list[int]
    """Position of each row."""
    is_loud: torch.Tensor
    """[T] bool: the row sees a leaf's V."""
    earlier: int


def make_tree_case(
    geometry: Geometry, work: list[Work], dtype: torch.dtype, device: str = "cpu"
) -> TreeCase:
    """Trees have loud leaves; requests without one see all before each row."""
    lengths = [(item.q_len, item.kv_len) for item in work]
    case = make_case(geometry, lengths, dtype, device)
    words: list[int] = []
    visible: list[torch.Tensor] = []
    positions: list[int] = []
    loud: list[bool] = []
    earlier = max((item.earlier for item in work), default=0)
    for request, item in enumerate(work):
        first = item.kv_len - item.q_len
        if not item.is_tree:
            # A row's own bits alone, or all: both are causal.
            is_short = item.q_len + earlier <= 63 and random.random() < 0.5
            bits = [(2 << (earlier + row)) - 1 if is_short else -1 for row in range(item.q_len)]
            words += bits
            visible += [torch.arange(first + row + 1) for row in range(item.q_len)]
            positions += range(first, item.kv_len)
            loud += [False] * item.q_len
            continue
        root = first - earlier
        parents = random_parents(earlier + item.q_len)
        leaves = set(range(1, len(parents))) - set(parents)
        _make_loud(case, request, [root + leaf for leaf in leaves])
        for row in range(earlier, len(parents)):
            path = path_to(parents, row)
            visible.append(torch.tensor([*range(root), *(root + seen for seen in path)]))
            positions.append(root + len(path) - 1)
            loud.append(row in leaves)
        words += words_of(parents)[earlier:]
    return TreeCase(
        case,
        torch.tensor(words, dtype=torch.int64, device=device),
        visible,
        positions,
        torch.tensor(loud, dtype=torch.bool, device=device),
        earlier,
    )


def _make_loud(case: Case, request: int, places: list[int]) -> None:
    page_size = case.pool.shape[4]
    for place in places:
        page = int(case.page_table[request, place // page_size])
        case.pool[page, :, LAYER, 1, place % page_size] *= LOUD
        case.kv[request][1, :, place] *= LOUD


def hide_unseen(tree: TreeCase, window: int | None, first_position: int = 0) -> None:
    """NaN in the pool before all that any row of a request sees by its position."""
    case, starts = tree.case, tree.case.cu_q_lens.tolist()
    page_size = case.pool.shape[4]
    for request, kv_len in enumerate(case.kv_lens.tolist()):
        first, end = starts[request], starts[request + 1]
        least = 0 if window is None else min(tree.positions[first:end], default=0) + 1 - window
        hidden = torch.arange(min(kv_len, max(least, first_position)), device=case.pool.device)
        pages = case.page_table[request, hidden // page_size].long()
        case.pool[pages, :, LAYER, :, hidden % page_size] = float("nan")


def eager_trees(tree: TreeCase, window: int | None = None, first_position: int = 0) -> torch.Tensor:
    """Torch's own result in the dtype of the case."""
    case = tree.case
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    return in_parts(paged_attention_reference)(
        case.q,
        case.pool,
        LAYER,
        *lengths,
        case.max_q_len,
        case.max_kv_len,
        first_position=first_position,
        window=window,
        ancestors=tree.ancestors,
        earlier_rows=tree.earlier,
    )


def exact_trees(tree: TreeCase, window: int | None = None, first_position: int = 0) -> torch.Tensor:
    """The definition in float64, a row at a time: [T, Hq * D]; zeros where nothing is seen."""
    case = tree.case
    heads = case.q.shape[1]
    out = torch.zeros_like(case.q, dtype=torch.float64)
    starts = case.cu_q_lens.tolist()
    for request, plain in enumerate(case.kv):
        k, v = plain.double().repeat_interleave(heads // plain.shape[1], dim=1)
        for row in range(starts[request], starts[request + 1]):
            seen = tree.visible[row].to(k.device)
            seen = seen[seen >= first_position]
            if window is not None:
                seen = seen[seen > tree.positions[row] - window]
            scores = torch.einsum("hd,hnd->hn", case.q[row].double(), k[:, seen]) * case.scale
            out[row] = torch.einsum("hn,hnd->hd", scores.softmax(-1), v[:, seen])
    return out.flatten(1)


def assert_trees(
    out: torch.Tensor,
    tree: TreeCase,
    window: int | None = None,
    first_position: int = 0,
    max_rows: int | None = None,
) -> None:
    """Fails unless the rows of requests of so many are right; the others must be NaN.

    Rows that hear a leaf are apart from those that must not. What a weight's rounding makes of so
    loud a row is allowed.
    """
    q_lens = tree.case.cu_q_lens.diff().long()
    most = int(q_lens.max()) if max_rows is None else max_rows
    mine = (q_lens <= most).repeat_interleave(q_lens)
    eager = eager_trees(tree, window, first_position)
    exact = exact_trees(tree, window, first_position)
    loud, quiet = mine & tree.is_loud, mine & ~tree.is_loud
    assert_as_exact(out[quiet], eager[quiet], exact[quiet])
    slack = 16 * torch.finfo(out.dtype).eps * exact[loud].abs().amax().item() if loud.any() else 0.0
    assert_as_exact(out[loud], eager[loud], exact[loud], slack=slack)
    assert out[~mine].isnan().all()
