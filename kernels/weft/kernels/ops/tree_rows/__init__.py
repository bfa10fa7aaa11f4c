"""Trees of drafts after a step: finds the drawn path, and moves its K and V.

A verified request brings its last token as row 0 and its drafts as the rows after it, parents
first. Each row's K and V lie where a chain's would, and its word of `ancestors` says which rows it
sees (`weft.kernels.ops.attention.paged_attention`). The token drawn from a row follows that row, so
that exactly one path agrees with the drawn tokens (SpecInfer, Miao et al., arXiv 2305.09781,
section 4.3, with the target's own draws in place of trials).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.pages.pool import has_dense_pages
from weft.kernels.ops.pages.scaled_kv import entries_of
from weft.kernels.ops.step_rows.spec import SlotTokens, StepRows, Verified
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.tree_rows import triton_rows as _triton_rows
else:
    _triton_rows = deferred(__name__, "weft.kernels.ops.tree_rows.triton_rows")


def parent_of(word: int, row: int) -> int:
    """The row's parent in its tree, which is the last of its ancestors; -1 for row 0.

    Args:
        word: The row's word of `ancestors`.
    """
    return (word & (1 << row) - 1).bit_length() - 1


def accept_trees(
    drawn: torch.Tensor, step: StepRows, verified: Verified, known: SlotTokens
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follows the drawn tokens through each request's tree; the form of `accept_drafts` for trees.

    Args:
        drawn: [L] int64; negative where no token was drawn: such a row is on no path.
        step: The step that drew, with `ancestors`.
        verified: Its verified drafts; at most 32 rows each.
        known: Changed: the requests' last tokens, and their positions.

    Returns:
        [V] int64: row of the step that each request's last token was drawn from; [V] int64: its
        slot; [V, 1 + most drafts] int64: the rows of its path, row 0 first, -1 after its end.
    """
    if drawn.is_cuda:
        return _triton_rows.accept_trees(drawn, step, verified, known)
    assert step.ancestors is not None, "rows of trees have words"
    tokens, drafts, words = drawn.tolist(), step.token_ids.tolist(), step.ancestors.tolist()
    paths = torch.full_like(verified.rows, -1)
    for request, rows in enumerate(verified.rows.tolist()):
        if rows[0] < 0:
            continue
        path = [0]
        for own, row in enumerate(rows):
            parent = parent_of(words[row], own)
            is_child = own > 0 and row >= 0 and parent == path[-1]
            if is_child and tokens[rows[parent]] == drafts[row] and tokens[row] >= 0:
                path.append(own)
        paths[request, : len(path)] = torch.tensor([rows[own] for own in path])
    lengths = (paths >= 0).sum(dim=1, keepdim=True)
    last_rows = paths.gather(1, (lengths - 1).clamp(min=0))[:, 0].clamp(min=0)
    firsts, dummy = verified.rows[:, 0], len(known.starts) - 1
    slots = verified.slots[firsts].where(firsts >= 0, dummy)
    # A missing token is negative. What follows it is dropped, but needs an id of the vocabulary.
    known.tokens[0, slots] = drawn[last_rows].clamp(min=0)
    known.starts[slots] = step.positions[last_rows] + 1
    return last_rows, slots, paths


def move_paths(
    pool: torch.Tensor, places: torch.Tensor, rows: torch.Tensor, paths: torch.Tensor
) -> None:
    """Moves K and V of accepted paths to where those of chains would be, in all layers.

    Args:
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page, or in 8 bits;
            changed.
        places: [T] int64: page * page_size + offset of the step's rows.
        rows: [V, N] int64: each request's rows, -1 after its last.
        paths: [V, N] int64: rows of each path, -1 after its end. The row at (v, d) moves to the
            place of row (v, d), which is never after its own.
    """
    if not has_dense_pages(pool):
        raise ValueError(f"a pool with strides {pool.stride()} is not contiguous within a page")
    if pool.is_cuda:
        _triton_rows.move_paths(pool, places, rows, paths)
        return
    is_moved = (paths != rows) & (paths >= 0)
    if not is_moved.any():
        return
    page_size = pool.shape[4]
    source, target = places[paths[is_moved]], places[rows[is_moved]]
    # All places are read before any is written, since a place may be source and destination.
    for entries in entries_of(pool):
        moved = entries[source // page_size, :, :, :, source % page_size]
        entries[target // page_size, :, :, :, target % page_size] = moved
