"""The steps of a tree in torch, on any device."""

from __future__ import annotations

import torch
from weft.kernels.ops.draft_tree.spec import DraftTrees, Expanded, Nodes

_LAST_BIT = 62
"""Last bit of a word; ranks of dropped nodes are clamped to it."""


def grow_reference(
    nodes: Nodes,
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    parents: Expanded,
    trees: DraftTrees,
    depth: int,
) -> Expanded:
    """Gives nodes their children, and chooses those of them that get children.

    Args:
        nodes: Receives the children, and which of them get children.
        logits: [R * P, draft vocabulary] float32: logits of `parents`; NaN is never chosen.
        depth: Depth of the parents; 0 for the root.

    Returns:
        The `width` chosen nodes of each tree; undefined for the last level.
    """
    width, requests = trees.width, len(trees.starts)
    found = logits.log_softmax(dim=-1).topk(width, dim=-1)
    scores = parents.scores[:, None] + found.values
    scores = torch.where(scores.isnan(), -torch.inf, scores).view(requests, -1)
    tokens = target_ids[found.indices].view(requests, -1)
    paths = parents.paths[:, None].expand(-1, width).reshape(requests, -1)
    begin = 0 if depth == 0 else width + width * width * (depth - 1)
    for kept, values in zip(nodes, (tokens, scores, paths), strict=False):
        kept[:, begin : begin + tokens.shape[1]] = values
    best = scores.topk(width, dim=1).indices
    bits = torch.arange(width, device=best.device) + width * depth
    if depth + 1 < trees.depth:
        nodes.chosen[:, width * depth : width * (depth + 1)] = best + begin
    is_kept = trees.is_whole & (trees.max_depths > depth + 1)
    of_request = torch.arange(requests, device=best.device)[:, None] * (tokens.shape[1] // width)
    return Expanded(
        tokens.gather(1, best).flatten(),
        torch.where(is_kept[:, None], scores.gather(1, best), -torch.inf).flatten(),
        (paths.gather(1, best) | 1 << bits).flatten(),
        (of_request + best // width).flatten(),
    )


def keep_best_reference(nodes: Nodes, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nodes of highest path probability: tokens and words [num_nodes, R], as from
    `draft_tree`.
    """
    # The sort is stable, so parents come before children of equal score.
    order = nodes.scores.argsort(dim=1, descending=True, stable=True)
    best, each = order[:, :num_nodes], torch.arange(order.shape[1], device=order.device)
    ranks = torch.empty_like(order).scatter_(1, order, each.expand_as(order))
    # [R, expanded]: the bits of their rows.
    bits = 1 << (ranks.gather(1, nodes.chosen) + 1).clamp(max=_LAST_BIT)
    is_real = nodes.scores.gather(1, best) > -torch.inf
    paths = torch.where(is_real, nodes.paths.gather(1, best), 0)
    follows = paths[:, :, None] >> each[: bits.shape[1]] & 1
    words = 1 + (2 << each[:num_nodes]) + (follows * bits[:, None]).sum(dim=2)
    return nodes.tokens.gather(1, best).t().contiguous(), words.t().contiguous()
