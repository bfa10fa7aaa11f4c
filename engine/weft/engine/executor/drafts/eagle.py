"""Drafts from an EAGLE head: a chain of its most likely tokens behind a request's last one, or a
tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from weft.engine.base.device_copies import DeviceCopies
from weft.engine.executor.drafts.chains import ChainGraphs, LaterChains
from weft.engine.executor.drafts.tree_graphs import TreeArrays, TreeGraphs
from weft.engine.executor.drafts.trees import EagerTrees, tree_of
from weft.engine.executor.step import PageTable
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.scheduler.plan import LaterDrafts, VerifyItem
from weft.engine.scheduler.ports import Drafter
from weft.kernels.draft_head import DraftChains


class EagleDrafter(Drafter):
    """Runs the head of a drafted model, one turn for each draft, for many requests at once.

    The first step goes on from what the target's last step kept of a request; the later ones from
    the head's own states. Their entries in the pages are written anew by the target's step.

    Args:
        model: Target and head.
        pool: The target's.
        table: Page numbers by slot; the requests' pages are entered.
        page_size: Token positions a page.
        graphs: Captured chains, whose drafts stay on the device; None: there are none.
        tree_graphs: The same of trees, beside `graphs`.
        waits_for_trees: Trees must be known on the host first, since tokens are drawn there with
            the noise of their positions.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        table: PageTable,
        page_size: int,
        graphs: ChainGraphs | None = None,
        tree_graphs: TreeGraphs | None = None,
        *,
        waits_for_trees: bool = False,
    ) -> None:
        self._model = model
        self._pool = pool
        self._table = table
        self._page_size = page_size
        self._graphs = graphs
        self._tree_graphs = tree_graphs
        self._trees = EagerTrees(model, pool, table, page_size)
        self._copies = DeviceCopies(pool.device)
        self.waits_for_trees = waits_for_trees

    @property
    def is_on_device(self) -> bool:
        """See `Drafter.is_on_device`."""
        return self._graphs is not None

    def draft(self, items: Sequence[VerifyItem]) -> Sequence[Sequence[int]]:
        """See `Drafter.draft`; as many tokens as may be."""
        with torch.inference_mode():
            if items and items[0].tree is not None:
                if self._tree_graphs is not None:
                    return self._grow_on_device(self._tree_graphs, items)
                return self._trees.draft(items)
            if self._graphs is not None:
                return LaterChains(self._graphs, items, self._table, self._page_size)
            return self._draft_and_wait(items)

    def forget(self, slot: int) -> None:
        """See `Drafter.forget`: what is kept of a slot is written anew by its next request."""

    def _grow_on_device(
        self, graphs: TreeGraphs, items: Sequence[VerifyItem]
    ) -> Sequence[list[int]]:
        counts = [item.max_drafts for item in items]
        if not any(counts):
            return LaterDrafts(counts)
        arrays = TreeArrays.of_items(items, self._table, self._page_size)
        shapes = [item.tree for item in items if item.tree is not None]
        grown = graphs.forward(arrays, max(shapes)._replace(num_drafts=max(counts)))
        if not self.waits_for_trees:
            return LaterDrafts(counts)
        tokens, words = grown.cpu().transpose(1, 2).tolist()
        return [
            tree_of(tokens[index][:count], words[index][:count])
            for index, count in enumerate(counts)
        ]

    def _draft_and_wait(self, items: Sequence[VerifyItem]) -> list[list[int]]:
        # Those that get most first: the others leave the batch from its end.
        order = sorted(range(len(items)), key=lambda index: -items[index].max_drafts)
        order = [index for index in order if items[index].max_drafts > 0]
        drafts: list[list[int]] = [[] for _ in items]
        if order:
            chains: list[list[int]] = self._run([items[i] for i in order]).cpu().t().tolist()
            for index, chain in zip(order, chains, strict=True):
                drafts[index] = chain[: items[index].max_drafts]
        return drafts

    def _run(self, items: Sequence[VerifyItem]) -> torch.Tensor:
        """Runs chains, [D, R]; a request's column is valid as far as it has room."""
        depth, rows = items[0].max_drafts, len(items)
        for item in items:
            self._table.extend(item.request.slot, item.request.pages)
        slots = np.array([item.request.slot for item in items], np.int64)
        starts = np.array([item.start for item in items], np.int64)
        tokens = np.array([item.request.tokens[item.start] for item in items], np.int64)
        allowed = np.array([item.max_drafts for item in items], np.int64)
        # Those behind what an item gets are not run: they repeat its last one.
        positions = starts + np.minimum(np.arange(depth)[:, None], allowed - 1)
        num_pages = int(positions.max()) // self._page_size + 1
        pages = self._table.pages[slots, :num_pages]
        places = pages[np.arange(rows), positions // self._page_size].astype(np.int64)
        places = places * self._page_size + positions % self._page_size
        lengths, each = (positions + 1).astype(np.int32), np.arange(rows + 1, dtype=np.int32)
        columns = (slots, tokens, positions, places, lengths, each, pages)
        device_slots, token_ids, *sent, one_row_each, page_table = self._copies.send(columns)
        device_positions, device_places, kv_lens = (column.view(depth, rows) for column in sent)
        chains = DraftChains(
            positions=device_positions,
            slots=device_places,
            kv_lens=kv_lens,
            counts=[int((allowed > done).sum()) for done in range(depth)],
            page_table=page_table.view(rows, num_pages),
            one_row_each=one_row_each,
            max_kv_len=num_pages * self._page_size,
        )
        state = self._model.kept.index_select(0, device_slots)
        return self._model.head.chain(state, token_ids, chains, self._pool)
