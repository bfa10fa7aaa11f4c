"""Tokens a step of the trees that EAGLE-2 grows (arXiv:2406.16858, section 4).

Behind each position a tree is grown: of each level the `width` nodes of highest path probability
get `width` children each. Of all nodes the N of highest path probability are verified; as a path
is never more probable than its beginning, they are a tree. Only the rank of the text's own nodes
is kept, from which the accepted lengths of all N and depths follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from .head import DraftHead, rotate
from .target import Rope, Target
from .texts import Text
from .training import autocast

MAX_DEPTH = 6
NUM_NODES = (4, 6, 8, 12, 16, 24, 31)
_NEVER = 1 << 20
"""The rank of a node that was not grown."""


class _Level(NamedTuple):
    """The nodes of one depth behind P positions, M of each."""

    tokens: torch.Tensor
    """[P, M] int64."""
    scores: torch.Tensor
    """[P, M]: logarithms of path probabilities."""
    is_right: torch.Tensor
    """[P, M]: all tokens up to here are the text's."""
    parents: torch.Tensor
    """[P, M] int64: of the expanded nodes of the level before."""


class _Expanded(NamedTuple):
    """What the head made of `width` nodes of a level; K and V of their paths."""

    states: torch.Tensor
    """[P, W, hidden]."""
    keys: torch.Tensor
    """[P, W, depth, kv_heads, dim]."""
    values: torch.Tensor


class _Prompt(NamedTuple):
    """What is known before anything is drafted."""

    keys: torch.Tensor
    """[columns, kv_heads, dim]: entries of target states."""
    values: torch.Tensor
    rope: Rope
    """Of positions 1 and up."""
    ends: torch.Tensor
    """[P] int64: positions behind which trees are grown."""


def tree_ranks(head: DraftHead, target: Target, text: Text, width: int) -> torch.Tensor:
    """[answer's positions, depths, depths] int64: at (p, d, j) how many of the nodes up to depth
    d + 1 are more probable than the text's own of depth j + 1; many if that was not grown."""
    ids = torch.from_numpy(text.tokens.astype("int64")).to(target.device)
    ends = torch.arange(text.num_prompt, len(ids) - 1, device=target.device)
    # Beyond the end nothing is right.
    wanted = functional.pad(ids, (0, MAX_DEPTH + 1), value=-1)
    states = target.states(ids[None])
    rope = target.rope(1, len(ids) + MAX_DEPTH)
    with torch.no_grad(), autocast(target, head.lm_head.dtype):
        first, keys, values = _entries(head, states.aux, ids, rope)
        prompt = _Prompt(keys, values, rope, ends)
        root = first[ends - 1][:, None]
        everywhere = torch.ones((len(ends), 1), dtype=torch.bool, device=ends.device)
        level = _children(head, root, everywhere.log().float(), everywhere, wanted[ends + 1], width)
        none = keys.new_empty((len(ends), 1, 0, *keys.shape[1:]))
        expanded, levels = _Expanded(root, none, none), [level]
        for depth in range(1, MAX_DEPTH):
            best = level.scores.topk(min(width, level.scores.shape[1])).indices
            tokens, scores, is_right, parents = (part.gather(1, best) for part in level)
            expanded = _expand(head, prompt, expanded, tokens, parents, depth)
            right = wanted[ends + depth + 1]
            level = _children(head, expanded.states, scores, is_right, right, width)
            levels.append(level)
    return _ranks(levels)


def _entries(
    head: DraftHead, aux: torch.Tensor, ids: torch.Tensor, rope: Rope
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States [columns, hidden], K and V of target states."""
    columns = (rope[0][: len(ids) - 1], rope[1][: len(ids) - 1])
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    states = head.first_step(aux, ids[None], columns, keys, values)
    return states[0], keys[0][0].transpose(0, 1), values[0][0].transpose(0, 1)


def _children(
    head: DraftHead,
    states: torch.Tensor,
    scores: torch.Tensor,
    is_right: torch.Tensor,
    right: torch.Tensor,
    width: int,
) -> _Level:
    """The most likely tokens behind states [P, W, hidden]."""
    found = head.logits(states).float().log_softmax(-1).topk(width)
    tokens = head.token_ids[found.indices]
    right_ones = is_right[..., None] & (tokens == right[:, None, None])
    parents = torch.arange(states.shape[1], device=states.device)[None, :, None]
    return _Level(
        tokens.flatten(1),
        (scores[..., None] + found.values).flatten(1),
        right_ones.flatten(1),
        parents.expand_as(tokens).flatten(1),
    )


def _expand(
    head: DraftHead,
    prompt: _Prompt,
    before: _Expanded,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depth: int,
) -> _Expanded:
    """Runs the head for nodes [P, W] at this depth."""
    layer = head.midlayer
    attn = layer.self_attn
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    state = before.states[rows, parents]
    embedded = layer.input_layernorm(functional.embedding(tokens, head.embedding).to(state.dtype))
    both = torch.cat([embedded, layer.hidden_norm(state).to(embedded.dtype)], dim=-1)
    # Positions count from 1 in the table of rotations.
    here = tuple(part[prompt.ends + depth - 1][:, None, None] for part in prompt.rope)
    query, key, value = (
        projection(both).unflatten(-1, (-1, attn.dim))
        for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
    )
    query, key = rotate(query, (here[0], here[1])), rotate(key, (here[0], here[1]))
    keys = torch.cat([before.keys[rows, parents], key[:, :, None]], dim=2)
    values = torch.cat([before.values[rows, parents], value[:, :, None]], dim=2)
    state = state + attn.o_proj(_attend(query, prompt, keys, values).flatten(2))
    state = state + layer.mlp(layer.post_attention_layernorm(state))
    return _Expanded(state, keys, values)


def _attend(
    query: torch.Tensor, prompt: _Prompt, keys: torch.Tensor, values: torch.Tensor
) -> torch.Tensor:
    """[P, W, heads, dim] over the entries up to each position and over those of the path."""
    kv_heads, dim = keys.shape[-2:]
    grouped = query.unflatten(2, (kv_heads, -1)) * dim**-0.5
    scores = torch.einsum("pwkgd,ckd->pwkgc", grouped, prompt.keys)
    columns = torch.arange(len(prompt.keys), device=query.device)
    is_seen = columns < prompt.ends[:, None]
    scores = scores.masked_fill(~is_seen[:, None, None, None], float("-inf"))
    own = torch.einsum("pwkgd,pwekd->pwkge", grouped, keys)
    weights = torch.cat([scores, own], dim=-1).softmax(-1, dtype=torch.float32).to(values.dtype)
    near, num_columns = weights[..., len(columns) :], len(columns)
    mixed = torch.einsum("pwkgc,ckd->pwkgd", weights[..., :num_columns], prompt.values)
    mixed = mixed + torch.einsum("pwkge,pwekd->pwkgd", near, values)
    return mixed.flatten(2, 3)


def _ranks(levels: Sequence[_Level]) -> torch.Tensor:
    """See `tree_ranks`."""
    # At most one node of a level is the text's.
    right = [level.scores.masked_fill(~level.is_right, -torch.inf).amax(1) for level in levels]
    # [P, levels, j]: nodes of that level before the right one of depth j.
    before = torch.stack(
        [
            torch.stack([(level.scores > one[:, None]).sum(1) for one in right], 1)
            for level in levels
        ],
        1,
    )
    grown = torch.stack(right, 1) > -torch.inf
    return before.cumsum(1).masked_fill(~grown[:, None], _NEVER)


def accepted_of(ranks: torch.Tensor, depth: int, num_nodes: int) -> list[int]:
    """How many tokens are right in the tree of so many nodes, by position of the answer."""
    found: list[int] = (ranks[:, depth - 1, :depth] < num_nodes).sum(1).tolist()
    return found
