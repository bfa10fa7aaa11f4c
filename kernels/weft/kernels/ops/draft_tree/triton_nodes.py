"""`weft.kernels.ops.draft_tree` on a GPU: two launches between two runs of the head, and one that
chooses the nodes to keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.ops.draft_tree.spec import DraftTrees, Expanded, Nodes
from weft.kernels.shared.launch_sizes import cdiv, next_power_of_2

_TILE = 2048
"""Entries of the vocabulary that a program reads."""


def grow(
    nodes: Nodes,
    logits: torch.Tensor,
    target_ids: torch.Tensor,
    parents: Expanded,
    trees: DraftTrees,
    depth: int,
) -> Expanded:
    """`weft.kernels.ops.draft_tree.reference.grow_reference` for CUDA tensors. Equally likely
    tokens come in the order of their ids.
    """
    (rows, vocab_size), width, device = logits.shape, trees.width, logits.device
    requests, tiles = len(trees.starts), cdiv(vocab_size, _TILE)
    of_tiles = torch.empty((2, rows, tiles), dtype=torch.float32, device=device)
    values = torch.empty((rows, tiles * width), dtype=torch.float32, device=device)
    ids = torch.empty((rows, tiles * width), dtype=torch.int32, device=device)
    _tile_kernel[(rows, tiles)](
        values,
        ids,
        *of_tiles,
        logits,
        logits.stride(0),
        vocab_size,
        TILE=_TILE,
        WIDTH=width,
        num_warps=4,
    )
    tokens, paths, state_rows = torch.empty((3, requests * width), dtype=torch.int64, device=device)
    scores = torch.empty(requests * width, dtype=torch.float32, device=device)
    expanded = Expanded(tokens, scores, paths, state_rows)
    num_parents = rows // requests
    _level_kernel[(requests,)](
        nodes,
        expanded,
        values,
        ids,
        *of_tiles,
        target_ids,
        parents,
        trees.is_whole,
        trees.max_depths,
        nodes.tokens.stride(0),
        nodes.chosen.stride(0),
        0 if depth == 0 else width + width * width * (depth - 1),
        depth,
        vocab_size,
        tiles,
        PARENTS=num_parents,
        WIDTH=width,
        IS_LAST=depth + 1 == trees.depth,
        TILES=next_power_of_2(tiles),
        FOUND=next_power_of_2(tiles * width),
        CHILDREN=next_power_of_2(num_parents * width),
        num_warps=1,
    )
    return expanded


def keep_best(nodes: Nodes, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    requests, num_grown = nodes.tokens.shape
    num_expanded = nodes.chosen.shape[1]
    size = (num_nodes, requests)
    tokens, words = torch.empty((2, *size), dtype=torch.int64, device=nodes.tokens.device)
    _keep_kernel[(requests,)](
        tokens,
        words,
        nodes,
        num_grown,
        num_expanded,
        num_nodes,
        requests,
        GROWN=next_power_of_2(num_grown),
        EXPANDED=next_power_of_2(max(1, num_expanded)),
        num_warps=8,
    )
    return tokens, words


@triton.jit
def _tile_kernel(
    values: tl.tensor,
    ids: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    logits: tl.tensor,
    stride: int,
    vocab_size: int,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """The largest logits of a tile of a row, and the tile's sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tile * TILE + tl.arange(0, TILE)
    mask = column < vocab_size
    found = tl.load(logits + row * stride + column, mask=mask, other=float("-inf"))
    # NaN is never chosen.
    found = tl.where(found == found, found, float("-inf"))
    most = tl.max(found, axis=0)
    is_empty = most == float("-inf")
    total = tl.sum(tl.exp(found - tl.where(is_empty, 0.0, most)), axis=0)
    at = row * tl.num_programs(1) + tile
    tl.store(largest + at, most)
    tl.store(sums + at, total)
    left = mask
    for place in tl.static_range(WIDTH):
        best = tl.max(tl.where(left, found, float("-inf")), axis=0)
        token = tl.min(tl.where(left & (found == best), column, vocab_size), axis=0)
        left = left & (column != token)
        tl.store(values + at * WIDTH + place, best)
        tl.store(ids + at * WIDTH + place, token)


@triton.jit(do_not_specialize=["begin", "depth"])
def _level_kernel(
    nodes: Nodes,
    expanded: Expanded,
    values: tl.tensor,
    ids: tl.tensor,
    largest: tl.tensor,
    sums: tl.tensor,
    target_ids: tl.tensor,
    parents: Expanded,
    is_whole: tl.tensor,
    max_depths: tl.tensor,
    node_stride: int,
    chosen_stride: int,
    begin: int,
    depth: int,
    vocab_size: int,
    tiles: int,
    PARENTS: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_LAST: tl.constexpr,
    TILES: tl.constexpr,
    FOUND: tl.constexpr,
    CHILDREN: tl.constexpr,
) -> None:
    """One request's nodes."""
    request = tl.program_id(0).to(tl.int64)
    child = tl.arange(0, CHILDREN)
    score = tl.full([CHILDREN], float("-inf"), tl.float32)
    column = tl.zeros([CHILDREN], tl.int32)
    path = tl.zeros([CHILDREN], tl.int64)
    tile = tl.arange(0, TILES)
    place = tl.arange(0, FOUND)
    for parent in tl.static_range(PARENTS):
        row = request * PARENTS + parent
        most = tl.load(largest + row * tiles + tile, mask=tile < tiles, other=float("-inf"))
        share = tl.load(sums + row * tiles + tile, mask=tile < tiles, other=0.0)
        highest = tl.max(most, axis=0)
        total = tl.sum(tl.where(share > 0.0, share * tl.exp(most - highest), 0.0), axis=0)
        log_total = tl.log(total)
        parent_score = tl.load(parents.scores + row)
        parent_path = tl.load(parents.paths + row)
        is_there = place < tiles * WIDTH
        at = row * tiles * WIDTH + place
        value = tl.load(values + at, mask=is_there, other=float("-inf"))
        name = tl.load(ids + at, mask=is_there, other=vocab_size)
        left = is_there
        for number in tl.static_range(WIDTH):
            best = tl.max(tl.where(left, value, float("-inf")), axis=0)
            first = tl.min(tl.where(left & (value == best), name, vocab_size), axis=0)
            left = left & (name != first)
            is_own = child == parent * WIDTH + number
            # A child's score must not exceed its parent's by rounding, since parents come first.
            chance = best - highest - log_total
            chance = tl.where(chance == chance, tl.minimum(chance, 0.0), float("-inf"))
            path_score = parent_score + chance
            score = tl.where(is_own, path_score, score)
            column = tl.where(is_own, tl.minimum(first, vocab_size - 1), column)
            path = tl.where(is_own, parent_path, path)
    is_child = child < PARENTS * WIDTH
    token = tl.load(target_ids + column, mask=is_child, other=0)
    at = request * node_stride + begin + child
    tl.store(nodes.tokens + at, token, mask=is_child)
    tl.store(nodes.scores + at, score, mask=is_child)
    tl.store(nodes.paths + at, path, mask=is_child)
    if not IS_LAST:
        is_kept = tl.load(is_whole + request) & (tl.load(max_depths + request) > depth + 1)
        left = is_child
        for number in tl.static_range(WIDTH):
            best = tl.max(tl.where(left, score, float("-inf")), axis=0)
            index = tl.min(tl.where(left & (score == best), child, CHILDREN), axis=0)
            is_own = child == index
            left = left & ~is_own
            bit = WIDTH * depth + number
            own_path = tl.sum(tl.where(is_own, path, 0), axis=0)
            one = tl.full([], 1, tl.int64)
            at = request * WIDTH + number
            tl.store(expanded.tokens + at, tl.sum(tl.where(is_own, token, 0), axis=0))
            tl.store(expanded.scores + at, tl.where(is_kept, best, float("-inf")))
            tl.store(expanded.paths + at, own_path | (one << bit))
            tl.store(expanded.rows + at, request * PARENTS + index // WIDTH)
            tl.store(nodes.chosen + request * chosen_stride + bit, (begin + index).to(tl.int64))


@triton.jit
def _keep_kernel(
    tokens: tl.tensor,
    words: tl.tensor,
    nodes: Nodes,
    num_grown: int,
    num_expanded: int,
    num_nodes: int,
    requests: int,
    GROWN: tl.constexpr,
    EXPANDED: tl.constexpr,
) -> None:
    """One request's nodes."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, GROWN)
    is_node = node < num_grown
    at = request * num_grown + node
    score = tl.load(nodes.scores + at, mask=is_node, other=float("-inf"))
    is_before = (score[None, :] > score[:, None]) | (
        (score[None, :] == score[:, None]) & (node[None, :] < node[:, None])
    )
    rank = tl.sum((is_before & is_node[None, :]).to(tl.int32), axis=1)
    place = tl.arange(0, EXPANDED)
    is_place = place < num_expanded
    index = tl.load(nodes.chosen + request * num_expanded + place, mask=is_place, other=0)
    own = tl.load(nodes.scores + request * num_grown + index, mask=is_place, other=float("-inf"))
    is_before = (score[None, :] > own[:, None]) | (
        (score[None, :] == own[:, None]) & (node[None, :] < index[:, None])
    )
    own_rank = tl.sum((is_before & is_node[None, :]).to(tl.int32), axis=1)
    one = tl.full([], 1, tl.int64)
    bits = one << tl.minimum(own_rank + 1, 62)
    path = tl.load(nodes.paths + at, mask=is_node, other=0)
    path = tl.where(score > float("-inf"), path, 0)
    follows = ((path[:, None] >> place[None, :]) & 1 == 1) & is_place[None, :]
    word = 1 + (one << tl.minimum(rank + 1, 62))
    word += tl.sum(tl.where(follows, bits[None, :], 0), axis=1)
    is_kept = is_node & (rank < num_nodes)
    to = rank * requests + request
    tl.store(tokens + to, tl.load(nodes.tokens + at, mask=is_node, other=0), mask=is_kept)
    tl.store(words + to, word, mask=is_kept)
