"""Trees of drafts from a head of EAGLE-3, grown as EAGLE-2 does (Li et al. 2024, section 4).

On each level the `width` nodes of highest path probability get `width` children each. In the end
the nodes of highest path probability are kept; they form a tree, since a path is never more
probable than its beginning. A level is one run of the head. Its rows follow one another after the
last token, until the target's step overwrites them.

    rows of the head   root | level 1: w rows | level 2: w rows | ...
    places             start  start + 1 ...     start + 1 + w ...
    positions          start  start + 1         start + 2
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from weft.kernels.ops.draft_head.operations import draft_turn
from weft.kernels.ops.draft_head.spec import DraftHeadWeight, TurnRows
from weft.kernels.ops.draft_tree.reference import grow_reference, keep_best_reference
from weft.kernels.ops.draft_tree.spec import DraftTrees, Expanded, Nodes
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.draft_tree import triton_nodes as _triton_nodes
else:
    _triton_nodes = deferred(__name__, "weft.kernels.ops.draft_tree.triton_nodes")


def draft_tree(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    trees: DraftTrees,
    pool: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grows trees, without waiting for a device.

    Args:
        state: [R, H]: g of the position before the last token.
        token_ids: [R] int64: last tokens.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page; written.
        layer: Index of the head's layer in the pool.

    Returns:
        Tokens [num_nodes, R] int64 of the target's vocabulary, and words [num_nodes, R] int64. Node
        i is row i + 1 of its request after the last token. The bits of its word are the rows that
        it sees, itself and row 0 among them (`weft.kernels.ops.attention`). Nodes come in the order
        of their path probabilities. Nodes that must not be kept follow row 0.
    """
    requests, num_grown = len(trees.starts), trees.num_grown
    whole = torch.empty((2, requests, num_grown), dtype=torch.int64, device=state.device)
    nodes = Nodes(
        whole[0],
        torch.empty((requests, num_grown), dtype=torch.float32, device=state.device),
        whole[1],
        whole.new_empty((requests, trees.width * (trees.depth - 1))),
    )
    expanded = Expanded(
        token_ids,
        torch.where(trees.max_depths >= 1, 0.0, -torch.inf),
        torch.zeros_like(token_ids),
        token_ids,
    )
    for depth, turn in enumerate(_turns(trees)):
        if depth > 0:
            turn = replace(turn, ancestors=expanded.paths)
        state, logits = draft_turn(state, expanded.tokens, w, turn, pool, layer)
        expanded = _grow(nodes, logits, w.target_ids, expanded, trees, depth)
        if depth + 1 < trees.depth:
            state = state.index_select(0, expanded.rows)
    return _keep_best(nodes, trees.num_nodes)


def _turns(trees: DraftTrees) -> list[TurnRows]:
    """Rows of each level, the root's first, still without ancestor words. A tree without pages for
    its places has an empty context and writes to the null page.
    """
    width, requests, device = trees.width, len(trees.starts), trees.starts.device
    turns = [
        TurnRows(
            positions=trees.starts,
            slots=trees.slots[0],
            page_table=trees.page_table,
            cu_q_lens=trees.cu_q_lens,
            kv_lens=(trees.starts + 1).int(),
            max_kv_len=trees.max_kv_len,
            lora=trees.root_lora,
        )
    ]
    if trees.depth == 1:
        return turns
    count = trees.depth - 1
    levels = torch.arange(1, trees.depth, device=device)
    # No node after the request's last possible position is kept.
    behind = torch.minimum(levels[:, None], trees.max_depths.clamp(min=0))
    positions = (trees.starts + behind).repeat_interleave(width, dim=1)
    slots = trees.slots[1:].view(count, width, requests).transpose(1, 2)
    slots = slots.reshape(count, requests * width).contiguous()
    begins = torch.where(trees.is_whole, trees.starts + 1, 1)
    kv_lens = (begins + width * levels[:, None]).int()
    page_table = torch.where(trees.is_whole[:, None], trees.page_table, 0)
    cu_q_lens = trees.cu_q_lens * width
    for level in range(count):
        turns.append(
            TurnRows(
                positions=positions[level],
                slots=slots[level],
                page_table=page_table,
                cu_q_lens=cu_q_lens,
                kv_lens=kv_lens[level],
                max_kv_len=trees.max_kv_len,
                max_q_len=width,
                earlier_rows=width * level,
                lora=trees.lora,
            )
        )
    return turns


def _grow(
    nodes: Nodes,
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    parents: Expanded,
    trees: DraftTrees,
    depth: int,
) -> Expanded:
    if logits.is_cuda:
        return _triton_nodes.grow(nodes, logits, target_ids, parents, trees, depth)
    return grow_reference(nodes, logits, target_ids, parents, trees, depth)


def _keep_best(nodes: Nodes, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    if nodes.tokens.is_cuda:
        return _triton_nodes.keep_best(nodes, num_nodes)
    return keep_best_reference(nodes, num_nodes)
