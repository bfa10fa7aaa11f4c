"""Trees of drafts from a head of EAGLE-3, grown as EAGLE-2 does (Li et al. 2024, section 4).

Of each level the `width` nodes of highest path probability get `width` children each; of all nodes
those of highest path probability are kept. As a path is never more probable than its beginning,
they form a tree. A level is one turn of the head, whose rows lie one behind the other after the
last token until the target's step writes its own there.

    rows of the head   root | level 1: w rows | level 2: w rows | ...
    places             start  start + 1 ...     start + 1 + w ...
    positions          start  start + 1         start + 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from weft.kernels.draft_head import DraftHeadWeight, TurnRows, draft_turn

_LAST_BIT = 62
"""Of a word; ranks of nodes that are not kept count as this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTrees:
    """Where trees behind the last tokens of R requests are grown."""

    width: int
    depth: int
    """Levels."""
    num_nodes: int
    """To be kept of each tree: at most as many as are grown, and 31."""
    starts: torch.Tensor
    """[R] int64: positions of the last tokens."""
    slots: torch.Tensor
    """[1 + width * (depth - 1), R] int64: page * page_size + offset of the places from `starts`
    on; of those that there are no pages for in the null page, page 0."""
    is_whole: torch.Tensor
    """[R] bool: there are pages for all; else a tree ends with the first level."""
    max_depths: torch.Tensor
    """[R] int64: no node is kept that lies deeper."""
    page_table: torch.Tensor
    """[R, max_pages] int32, contiguous along a row."""
    cu_q_lens: torch.Tensor
    """[R + 1] int32: 0, 1, 2 ..."""
    max_kv_len: int
    """Bound of all lengths."""


class _Nodes(NamedTuple):
    """M nodes of each of R trees."""

    tokens: torch.Tensor
    """[R, M] int64, of the target's vocabulary."""
    scores: torch.Tensor
    """[R, M] float32: logarithms of path probabilities."""
    paths: torch.Tensor
    """[R, M] int64: the expanded nodes that each follows, a bit each."""


def draft_tree(
    state: torch.Tensor,
    token_ids: torch.Tensor,
    w: DraftHeadWeight,
    trees: DraftTrees,
    pool: torch.Tensor,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grows trees; nothing in it waits for a device.

    Args:
        state: [R, H]: g of the position before the last token.
        token_ids: [R] int64: last tokens.
        w: The head.
        trees: What to grow.
        pool: As in `draft_entries`; the head's layer is written.
        layer: The head's, in the pool.

    Returns:
        Tokens [num_nodes, R] int64 of the target's vocabulary, and words [num_nodes, R] int64:
        node i is row i + 1 of its request behind its last token, and the bits of its word are the
        rows that it follows, itself and row 0 among them (`weft.kernels.attention`). Nodes come in
        the order of their path probabilities. Those that may not be follow row 0.
    """
    width, requests = trees.width, len(trees.starts)
    rows = TurnRows(
        positions=trees.starts,
        slots=trees.slots[0],
        page_table=trees.page_table,
        cu_q_lens=trees.cu_q_lens,
        kv_lens=(trees.starts + 1).int(),
        max_kv_len=trees.max_kv_len,
    )
    state, logits = draft_turn(state, token_ids, w, rows, pool, layer)
    root = _Nodes(
        token_ids.unsqueeze(1),
        torch.where(trees.max_depths >= 1, 0.0, -torch.inf).unsqueeze(1),
        torch.zeros_like(token_ids).unsqueeze(1),
    )
    level = _children(root, logits, w, width)
    levels, chosen = [level], []
    state = state.repeat_interleave(width, dim=0)
    for depth in range(1, trees.depth):
        best = level.scores.topk(width, dim=1).indices
        chosen.append(best + sum(part.tokens.shape[1] for part in levels[:-1]))
        first_bit = width * (depth - 1)
        own_bits = 1 << torch.arange(first_bit, first_bit + width, device=best.device)
        tokens, scores, paths = (part.gather(1, best) for part in level)
        is_kept = (trees.is_whole & (trees.max_depths > depth)).unsqueeze(1)
        scores = torch.where(is_kept, scores, -torch.inf)
        expanded = _Nodes(tokens, scores, paths | own_bits)
        if depth > 1:
            parents = best // width + width * torch.arange(requests, device=best.device)[:, None]
            state = state.index_select(0, parents.flatten())
        turn = _level_rows(trees, depth, expanded.paths)
        state, logits = draft_turn(state, tokens.flatten(), w, turn, pool, layer)
        level = _children(expanded, logits, w, width)
        levels.append(level)
    return _keep(levels, chosen, trees.num_nodes)


def _children(parents: _Nodes, logits: torch.Tensor, w: DraftHeadWeight, width: int) -> _Nodes:
    """The most likely tokens behind nodes [R, M], from logits [R * M, draft vocabulary]."""
    found = logits.log_softmax(dim=-1).topk(width, dim=-1)
    values = found.values.view(*parents.scores.shape, width)
    scores = parents.scores.unsqueeze(2) + values
    scores = torch.where(scores.isnan(), -torch.inf, scores).flatten(1)
    tokens = w.target_ids[found.indices].view(scores.shape)
    paths = parents.paths.unsqueeze(2).expand_as(values).flatten(1)
    return _Nodes(tokens, scores, paths)


def _level_rows(trees: DraftTrees, depth: int, words: torch.Tensor) -> TurnRows:
    """Of the expanded nodes of a level; those without a place are behind nothing, in the null
    page."""
    width = trees.width
    begin, is_whole = width * (depth - 1), trees.is_whole
    end = begin + width
    kv_lens = torch.where(is_whole, trees.starts + 1, 1) + end
    return TurnRows(
        positions=(trees.starts + depth).repeat_interleave(width),
        slots=trees.slots[1 + begin : 1 + end].t().flatten(),
        page_table=torch.where(is_whole.unsqueeze(1), trees.page_table, 0),
        cu_q_lens=trees.cu_q_lens * width,
        kv_lens=kv_lens.int(),
        max_kv_len=trees.max_kv_len + end,
        max_q_len=width,
        ancestors=words.flatten(),
        earlier_rows=begin,
    )


def _keep(
    levels: list[_Nodes], chosen: list[torch.Tensor], num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The nodes of highest path probability: tokens and words [num_nodes, R].

    Args:
        levels: All nodes.
        chosen: Of each level but the last [R, width] int64: the expanded ones, among all nodes.
        num_nodes: To be kept.
    """
    tokens, scores, paths = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    # Of equals the first comes first: parents before children.
    order = scores.argsort(dim=1, descending=True, stable=True)
    best = order[:, :num_nodes]
    own_bits = 2 << torch.arange(num_nodes, device=order.device)
    words = own_bits + 1 + torch.zeros_like(best)
    if chosen:
        ranks = torch.empty_like(order)
        ranks.scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
        # [R, expanded]: bits of their rows.
        bits = 1 << (ranks.gather(1, torch.cat(chosen, dim=1)) + 1).clamp(max=_LAST_BIT)
        path = torch.where(scores.gather(1, best) > -torch.inf, paths.gather(1, best), 0)
        follows = path.unsqueeze(2) >> torch.arange(bits.shape[1], device=bits.device) & 1
        words = words + (follows * bits.unsqueeze(1)).sum(dim=2)
    return tokens.gather(1, best).t().contiguous(), words.t().contiguous()
