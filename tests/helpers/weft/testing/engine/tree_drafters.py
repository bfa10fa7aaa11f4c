"""Trees of drafts that hold a known text among wrong branches, and the pages that come of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
import torch
from weft.contract.keys import PageKeys
from weft.engine.base.drafts import DraftShape
from weft.engine.base.token_trees import TokenTree
from weft.engine.executor.drafts.tree_graphs import TreeArrays
from weft.engine.executor.step_input import ON_DEVICE
from weft.engine.features.speculative.eagle import EagleDrafter
from weft.engine.loop.engine import Engine
from weft.engine.scheduler.plan import VerifyItem
from weft.testing.engine.drafters import KnownDrafter, RandomGate, speculate
from weft.testing.engine.eagle3_cases import HeadReference
from weft.testing.engine.later_drafts import fetched

SHAPES = (
    DraftShape(31, 6, 4),
    DraftShape(15, 3, 4),
    DraftShape(7, 5, 2),
    DraftShape(2, 2, 2),
    DraftShape(9, 1, 3),
)
MIXED = (0, 1, 3, 7, *SHAPES)
"""Shapes that a gate may choose from one step to the next."""


def random_tree(
    follows: Sequence[int], num_right: int, num_nodes: int, depth: int, vocab_size: int
) -> TokenTree:
    """A tree no deeper than `depth`, with a text's beginning among wrong branches.

    Args:
        follows: The text behind the last token.
        num_right: So much of it is in the tree.
        num_nodes: Of the tree.
        depth: At most.
        vocab_size: Of the model.
    """
    tokens, parents, depths = [-1], [-1], [0]
    right = [0]
    while len(tokens) <= num_nodes:
        lacks = num_right + 1 - len(right)
        if lacks and (lacks > num_nodes - len(tokens) or random.random() < 0.3):
            token, parent = follows[len(right) - 1], right[-1]
            right.append(len(tokens))
        else:
            parent = random.choice([row for row, deep in enumerate(depths) if deep < depth])
            taken = {token for token, of in zip(tokens, parents, strict=True) if of == parent}
            if parent in right:  # The text's own one comes by itself, or not at all.
                taken.update(follows[right.index(parent) :][:1])
            token = random.choice([t for t in range(vocab_size) if t not in taken])
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return TokenTree(tokens[1:], parents[1:])


class TreeDrafter(KnownDrafter):
    """Drafts what is known to follow, where trees are asked for among wrong branches.

    Args:
        texts: As of `KnownDrafter`.
        vocab_size: Of the model.
        chance: Of each draft to be right, if those before it are.
        is_varied: Some trees are small, or chains.
    """

    def __init__(
        self,
        texts: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        chance: float,
        *,
        is_varied: bool = True,
    ) -> None:
        super().__init__(texts, vocab_size, chance)
        self._is_varied = is_varied
        self.num_right = self.num_trees = 0
        """Number of correct drafts in all trees."""

    def _draft(self, item: VerifyItem) -> list[int]:
        if item.tree is None or (self._is_varied and random.random() < 0.1):
            return super()._draft(item)[: item.max_accepted]
        request = item.request
        prompt = tuple(request.tokens[: request.num_prompt_tokens])
        follows = list(self._texts[prompt, request.seed][item.start + 1 :])
        count = item.max_drafts
        if self._is_varied:
            count = random.choice((count, random.randint(0, count)))
        most, num_right = min(count, item.tree.depth, len(follows)), 0
        while num_right < most and random.random() < self._chance:
            num_right += 1
        self.num_trees += 1
        self.num_right += num_right
        return random_tree(follows, num_right, count, item.tree.depth, self._vocab_size)


class WatchedTrees:
    """Notes the trees that a head grows, and has better ones verified.

    Args:
        engine: With a head of EAGLE-3.
        known: Drafts these.
        shapes: That are asked for.
    """

    def __init__(
        self, engine: Engine, known: TreeDrafter, shapes: Sequence[int | DraftShape] = MIXED
    ) -> None:
        assert engine.drafter is not None
        self._drafter, self._known = engine.drafter, known
        self._tokens = engine.parts.local.known
        self.trees: list[tuple[list[int], VerifyItem, TokenTree]] = []
        """Tokens so far, what was asked for, and what came."""
        self._page_size = engine.config.page_size
        speculate(engine, known, shapes)
        engine.pipeline._drafter = self
        assert isinstance(engine.scheduler.running_plans.gate, RandomGate)
        self._gate = engine.scheduler.running_plans.gate

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`."""
        for item, tree in zip(items, fetched(self._drafter, items, self._tokens), strict=True):
            if item.tree is None:
                continue
            assert len(tree) <= item.max_drafts
            # Where there are no pages for all levels there are fewer.
            num_places = len(item.request.held.pages) * self._page_size - item.start - 1
            if isinstance(tree, TokenTree) and num_places >= self._gate.last.num_places:
                self.trees.append((item.request.tokens[: item.start + 1], item, tree))
        return self._known.draft(items)

    def check(self, reference: HeadReference, count: int, tolerance: float = 1e-4) -> None:
        """Compares some trees with the head's, read plainly, where it is clear what is grown.

        Args:
            reference: The head.
            count: Of trees.
            tolerance: Of logarithms of path probabilities.
        """
        assert len(self.trees) > count, len(self.trees)
        num_checked = 0
        for tokens, item, tree in random.sample(self.trees, len(self.trees)):
            assert item.tree is not None
            known, gap = reference.tree(tokens, item.tree.width, item.tree.depth)
            if gap < tolerance / 5:
                continue
            num_checked += 1
            if num_checked > count:
                break
            paths: list[tuple[int, ...]] = [()]
            for token, parent in zip(tree, tree.parents, strict=True):
                paths.append((*paths[parent], token))
            best = sorted(known.values(), reverse=True)[: item.max_drafts]
            # Behind all that may be there are others, which are right by chance alone.
            assert len(tree) >= len(best), (item, tree)
            kept = paths[1 : 1 + len(best)]
            assert len(set(kept)) == len(best), (item, tree, tree.parents)
            scores = [known.get(path, -float("inf")) for path in kept]
            assert scores == pytest.approx(best, abs=tolerance), (item, tree, tree.parents)
        assert num_checked


class PublishedPages:
    """Pages published by an engine on a CPU, by key.

    Args:
        engine: With an empty cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.pages: dict[bytes, int] = {}
        engine.memory.on_published.append(self._note)
        engine.memory.on_evicted.append(lambda key: self.pages.pop(key, None))

    def of(self, tokens: Sequence[int], num_pages: int) -> torch.Tensor | None:
        """[n, Hkv, layers, 2, page_size, D] of a text's first pages, all layers; None: they are
        not there. Nobody reads the draft's entry of position 0."""
        keys = PageKeys(self._engine._intake.namespace(""), self._engine.config.page_size)
        found = [self.pages.get(key) for key in keys.upto(list(tokens), num_pages)]
        if None in found:
            return None
        pages = self._engine.parts.local.pool[found].clone()
        if self._engine.parts.layout.plane.draft:
            pages[0, :, -1, :, 0] = 0.0
        return pages

    def _note(self, page: int, key: bytes, parent: bytes) -> None:
        self.pages[key] = page


class KnownTreeGraphs:
    """Takes the place of a head's captured trees: grows them around texts, on the device.

    Args:
        engine: With a head of EAGLE-3, `draft_width` > 1 and captured chains.
        texts: As of `KnownDrafter`; all samples of a prompt have the same.
        vocab_size: Of the model.
        chance: Of each draft to be right.
    """

    def __init__(
        self,
        engine: Engine,
        texts: Mapping[tuple[tuple[int, ...], int], Sequence[int]],
        vocab_size: int,
        chance: float,
    ) -> None:
        self._texts = {prompt: text for (prompt, _), text in texts.items()}
        self._vocab_size = vocab_size
        self._chance = chance
        self._running = engine.scheduler.running
        self._known = engine.parts.local.known
        self.num_late = 0
        """Trees whose begin the host did not know."""
        drafter = engine.drafter
        assert isinstance(drafter, EagleDrafter)
        drafter._tree_graphs = self  # type: ignore[assignment]
        drafter.waits_for_trees = False

    def forward(self, arrays: TreeArrays, shape: DraftShape) -> torch.Tensor:
        """See `TreeGraphs.forward`."""
        owners = {request.slot: request for request in self._running}
        size = (shape.num_drafts, len(arrays.slots))
        found = torch.empty((2, *size), dtype=torch.int64)
        for column, (slot, start, _, max_depth, _) in enumerate(zip(*arrays, strict=True)):
            self.num_late += start == ON_DEVICE
            begin = int(self._known.starts[slot]) if start == ON_DEVICE else int(start)
            request = owners[int(slot)]
            text = self._texts[tuple(request.tokens[: request.num_prompt_tokens])]
            follows = text[begin + 1 :]
            depth = max(1, min(shape.depth, int(max_depth)))
            most, num_right = min(shape.num_drafts, depth, len(follows)), 0
            while num_right < most and random.random() < self._chance:
                num_right += 1
            tree = random_tree(follows, num_right, shape.num_drafts, depth, self._vocab_size)
            words = [1]
            for row, parent in enumerate(tree.parents, 1):
                words.append(words[parent] | 1 << row)
            found[0, :, column] = torch.tensor(tree)
            found[1, :, column] = torch.tensor(words[1:])
        found = found.to(self._known.tokens.device)
        slots = torch.from_numpy(arrays.slots.copy()).to(found.device)
        for kept, values in zip((self._known.tokens, self._known.words), found, strict=True):
            assert kept is not None
            kept[1 : 1 + len(values)].index_copy_(1, slots, values)
        return found
