"""Mean accepted length of a head on greedy texts, and of prompt lookup beside it.

A draft of depth k at position p is accepted up to its first token that the text does not have. As
the tokens before that one are those of the text, the unrolled forward of training tells all of it:
in step s the head has drafted the token at p + s + 1 right where its most likely token is the
text's. Then a text is walked through as an engine does it: a step yields the accepted tokens and
the target's own next one.

Of trees the same forward tells two things. A chain with the w - 1 next likely tokens beside each of
its own ("siblings") goes one token further where its first wrong token has the right one beside it;
it costs the draft nothing more, and the target w rows for each token of depth. And no tree whose
nodes have at most w children goes further than the tree that has all of them ("full"), which cannot
be verified, but bounds what trees can bring. What an engine would verify is the best part of such a
tree (EAGLE-2's, `trees.py`), which is grown for each position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from rich.progress import track

from .head import DraftHead
from .target import Target
from .texts import KINDS, Text, pad
from .training import autocast
from .trees import MAX_DEPTH, NUM_NODES, accepted_of, tree_ranks

DEPTHS = range(1, 8)
_NGRAMS = (4, 3, 2)
"""Tokens at the end of the text that prompt lookup looks for, the longest first."""
_BATCH = 8


@dataclass(slots=True)
class Walk:
    """Steps that an engine would take, by depth."""

    steps: int = 0
    tokens: int = 0

    @property
    def tokens_per_step(self) -> float:
        """Mean accepted length, with the target's own token: 1 without any draft."""
        return self.tokens / max(self.steps, 1)


def walk(text: Text, accepted: Sequence[int], depth: int, total: Walk) -> None:
    """Adds the steps of one text's answer, but for its first token, which the prompt's step makes.

    Args:
        text: An answer of the target.
        accepted: Of each position, the drafted tokens after it that are right.
        depth: Tokens drafted a step.
        total: Added to.
    """
    position, end = text.num_prompt, len(text.tokens) - 1
    while position < end:
        # What is drafted beyond the end is cut.
        gained = min(min(accepted[position], depth) + 1, end - position)
        total.steps += 1
        total.tokens += gained
        position += gained


@dataclass(slots=True)
class Accepted:
    """For each text and position p, how many tokens that were drafted after p are the text's."""

    chain: list[list[int]] = field(default_factory=list)
    """Of a greedy chain."""
    siblings: list[list[int]] = field(default_factory=list)
    """Of that chain with siblings."""
    full: list[list[int]] = field(default_factory=list)
    """Of the full tree."""


def accepted_lengths(
    head: DraftHead, target: Target, texts: Sequence[Text], width: int = 1
) -> Accepted:
    """What is accepted after every position, up to the greatest depth.

    Args:
        head: To be measured.
        target: Its target.
        texts: Greedy answers.
        width: Children of a node in the trees.
    """
    depth = max(DEPTHS)
    found = Accepted()
    for start in range(0, len(texts), _BATCH):
        group = texts[start : start + _BATCH]
        batch = pad(group, 1.0)
        ids, is_text = batch.ids.to(target.device), batch.weights.to(target.device) > 0
        states = target.states(ids)
        rope = target.rope(1, ids.shape[1])
        # Whether the text's token is the most likely one, and whether it is among the first ones.
        is_right = torch.zeros((2, depth, *ids.shape), dtype=torch.bool, device=target.device)
        with torch.no_grad(), autocast(target, head.lm_head.dtype):
            for step, state in enumerate(head.unroll(states.aux, ids, rope, depth)):
                drafted = head.token_ids[head.logits(state).topk(width).indices]
                # Column c predicts token c + 2, and its chain began `step` positions before.
                hits = drafted[:, step:-1] == ids[:, step + 2 :, None]
                hits &= is_text[:, step + 2 :, None]  # Nothing is accepted behind the end.
                is_right[0, step, :, 1 : 1 + hits.shape[1]] = hits[..., 0]
                is_right[1, step, :, 1 : 1 + hits.shape[1]] = hits.any(-1)
        chain, full = is_right.int().cumprod(1).sum(1)
        # Where the chain ends, `full` is longer if the right token was beside its wrong one.
        siblings = chain + (full > chain).int()
        for lengths, kept in ((chain, found.chain), (siblings, found.siblings), (full, found.full)):
            rows = lengths.tolist()
            kept += [rows[row][: len(text.tokens)] for row, text in enumerate(group)]
    return found


def lookup_lengths(tokens: Sequence[int]) -> list[int]:
    """For each position, how many tokens are right that prompt lookup drafts after it.

    The last tokens up to there are looked for earlier in the text, the latest place first; what
    followed there, as far as it is known by then, is the draft.
    """
    places: dict[tuple[int, ...], int] = {}
    lengths = []
    for position in range(len(tokens)):
        ends = [tuple(tokens[max(position + 1 - n, 0) : position + 1]) for n in _NGRAMS]
        place = next((places[end] for end in ends if end in places), position + 1)
        length = 0
        for offset in range(min(max(DEPTHS), position + 1 - place, len(tokens) - position - 1)):
            if tokens[place + offset] != tokens[position + 1 + offset]:
                break
            length += 1
        lengths.append(length)
        places |= {end: position + 1 for n, end in zip(_NGRAMS, ends, strict=True) if len(end) == n}
    return lengths


def measure_head(head: DraftHead, target: Target, texts: Sequence[Text]) -> dict[str, list[float]]:
    """Tokens a step of a head, by kind (and "all"): one number for each depth.

    Args:
        head: To be measured.
        target: Its target.
        texts: Greedy answers to prompts that were not trained on.
    """
    return _by_kind(texts, accepted_lengths(head, target, texts).chain)


def measure_trees(
    head: DraftHead, target: Target, texts: Sequence[Text], width: int
) -> dict[str, dict[str, list[float]]]:
    """As `measure_head`, of a chain, of a chain with siblings and of the full tree of a width."""
    accepted = accepted_lengths(head, target, texts, width)
    return {
        "eagle": _by_kind(texts, accepted.chain),
        f"eagle, {width} wide, siblings": _by_kind(texts, accepted.siblings),
        f"eagle, {width} wide, full tree": _by_kind(texts, accepted.full),
    }


def measure_grown(
    head: DraftHead, target: Target, texts: Sequence[Text], width: int
) -> dict[str, dict[str, list[float]]]:
    """Of trees that are grown `width` wide: by depth and kind, one number for each of `NUM_NODES`.

    Only those of the same depth as a chain take as many steps of the head.
    """
    ranks = [
        tree_ranks(head, target, text, width)
        for text in track(texts, "growing trees", transient=True)
    ]
    table: dict[str, dict[str, list[float]]] = {}
    for depth in range(2, MAX_DEPTH + 1):
        columns = []
        for num_nodes in NUM_NODES:
            accepted = [
                [0] * text.num_prompt + accepted_of(rank, depth, num_nodes)
                for text, rank in zip(texts, ranks, strict=True)
            ]
            columns.append(_by_kind(texts, accepted, depths=(depth,)))
        table[f"eagle, {width} wide, {depth} deep"] = {
            kind: [column[kind][0] for column in columns] for kind in (*KINDS, "all")
        }
    return table


def measure_lookup(texts: Sequence[Text]) -> dict[str, list[float]]:
    """Tokens a step of prompt lookup, as `measure_head` tells them."""
    return _by_kind(texts, [lookup_lengths(text.tokens.tolist()) for text in texts])


def _by_kind(
    texts: Sequence[Text], accepted: Sequence[Sequence[int]], depths: Sequence[int] = DEPTHS
) -> dict[str, list[float]]:
    table = {}
    for kind in (*KINDS, "all"):
        totals = []
        for depth in depths:
            total = Walk()
            for text, lengths in zip(texts, accepted, strict=True):
                if kind in (text.kind, "all"):
                    walk(text, lengths, depth, total)
            totals.append(round(total.tokens_per_step, 4))
        table[kind] = totals
    return table
