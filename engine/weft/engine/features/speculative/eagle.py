"""Drafts from an EAGLE head: a chain, or a tree, of its most likely tokens after a request's last
token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from weft.engine.base.drafts import DraftShape, LaterDrafts
from weft.engine.executor.drafts.chains import ChainGraphs, LaterChains
from weft.engine.executor.drafts.eager_chains import Chains, EagerChains, LastTokens
from weft.engine.executor.drafts.tree_graphs import TreeArrays, TreeGraphs
from weft.engine.executor.drafts.trees import EagerTrees, tree_of
from weft.engine.executor.step_input import ON_DEVICE
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.scheduler.ports import Drafter
from weft.pages.memory.page_table import PageTable


class EagleDrafter(Drafter):
    """Drafts with the head of a drafted model. With graphs, drafts stay on the device until a step
    needs them; without graphs, `draft` waits for them.

    Args:
        table: Page table, in which the drafter enters the pages of its requests.
        graphs: Captured chains; None: drafting is not captured.
        tree_graphs: Captured trees; given only together with `graphs`.
        waits_for_trees: Whether trees must reach the host before the step, because the host draws
            tokens with the noise of their positions.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        table: PageTable,
        page_size: int,
        chains: Chains | None = None,
        graphs: ChainGraphs | None = None,
        tree_graphs: TreeGraphs | None = None,
        *,
        waits_for_trees: bool = False,
    ) -> None:
        self._table = table
        self._page_size = page_size
        self._graphs = graphs
        self._tree_graphs = tree_graphs
        self._chains = chains or EagerChains(model, pool, table, page_size)
        self._trees = EagerTrees(model, pool, table, page_size)
        self.waits_for_trees = waits_for_trees

    @property
    def is_on_device(self) -> bool:
        return self._graphs is not None

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        with torch.inference_mode():
            if items and items[0].tree is not None:
                if self._tree_graphs is not None:
                    return self._grow_on_device(self._tree_graphs, items)
                return self._grow_and_wait(items)
            if self._graphs is not None:
                return self._chains_on_device(self._graphs, items)
            return self._chains_and_wait(items)

    def forget(self, slot: int) -> None:
        """Does nothing: the slot's next request overwrites its state."""

    def _chains_on_device(self, graphs: ChainGraphs, items: Sequence[VerifyItem]) -> LaterChains:
        counts = [item.max_drafts for item in items]
        are_masked = any(item.request.params.constraint is not None for item in items)
        return LaterChains(graphs, counts, to_host=are_masked)

    def _grow_on_device(
        self, graphs: TreeGraphs, items: Sequence[VerifyItem]
    ) -> Sequence[list[int]]:
        counts = [item.max_drafts for item in items]
        if not any(counts):
            return LaterDrafts(counts)
        columns = []
        for item in items:
            request = item.request
            self._table.extend(request.slot, request.held.pages)
            start = ON_DEVICE if item.starts_late else item.start
            limit = len(request.held.pages) * self._page_size
            columns.append((request.slot, start, limit, item.max_accepted, request.adapter_slot))
        arrays = TreeArrays(*np.array(columns, np.int64).T)
        shapes = [item.tree for item in items if item.tree is not None]
        grown = graphs.forward(arrays, max(shapes)._replace(num_drafts=max(counts)))
        if not self.waits_for_trees:
            return LaterDrafts(counts)
        tokens, words = grown.cpu().transpose(1, 2).tolist()
        return [
            tree_of(tokens[index][:count], words[index][:count])
            for index, count in enumerate(counts)
        ]

    def _grow_and_wait(self, items: Sequence[VerifyItem]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in items]
        wanted = [index for index, item in enumerate(items) if item.max_drafts > 0]
        if not wanted:
            return drafts
        grown = [items[index] for index in wanted]
        size = self._page_size
        limits = np.array([len(item.request.held.pages) * size for item in grown], np.int64)
        depths = np.array([item.tree.depth if item.tree else 0 for item in grown], np.int64)
        tokens, words = self._trees.grow(self._lasts(grown), limits, depths, _largest(grown))
        columns = zip(tokens.t().tolist(), words.t().tolist(), strict=True)
        for index, (own_tokens, own_words) in zip(wanted, columns, strict=True):
            count = items[index].max_drafts
            drafts[index] = tree_of(own_tokens[:count], own_words[:count])
        return drafts

    def _chains_and_wait(self, items: Sequence[VerifyItem]) -> list[list[int]]:
        # Requests with the most drafts come first, so that finished ones leave the batch's end.
        order = sorted(range(len(items)), key=lambda index: -items[index].max_drafts)
        order = [index for index in order if items[index].max_drafts > 0]
        drafts: list[list[int]] = [[] for _ in items]
        if order:
            chosen = [items[index] for index in order]
            counts = np.array([item.max_drafts for item in chosen], np.int64)
            chains: list[list[int]]
            chains = self._chains.run(self._lasts(chosen), counts).cpu().t().tolist()
            for index, chain in zip(order, chains, strict=True):
                drafts[index] = chain[: items[index].max_drafts]
        return drafts

    def _lasts(self, items: Sequence[VerifyItem]) -> LastTokens:
        slots, tokens = list[int](), list[int]()
        for item in items:
            request = item.request
            self._table.extend(request.slot, request.held.pages)
            slots.append(request.slot)
            tokens.append(request.tokens[item.start])
        return LastTokens(*np.array((slots, [item.start for item in items], tokens), np.int64))


def _largest(items: Sequence[VerifyItem]) -> DraftShape:
    """The smallest shape that holds all trees of a step: the nodes and levels of the largest
    tree.
    """
    shapes = [item.tree for item in items if item.tree is not None]
    width, depth = shapes[0].width, max(shape.depth for shape in shapes)
    shape = DraftShape(max(item.max_drafts for item in items), depth, width)
    return shape._replace(num_drafts=min(shape.num_drafts, shape.num_grown))
