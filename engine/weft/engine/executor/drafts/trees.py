"""Trees of drafts from an EAGLE-3 head (EAGLE-2, Li et al. 2024, section 4)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import DeviceCopies
from weft.engine.base.drafts import DraftShape
from weft.engine.base.token_trees import TokenTree
from weft.engine.executor.drafts.eager_chains import LastTokens
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.heads.eagle3 import Eagle3Head
from weft.kernels.ops.draft_tree.spec import DraftTrees
from weft.kernels.ops.tree_rows import parent_of
from weft.pages.memory.page_table import PageTable


def tree_of(tokens: Sequence[int], words: Sequence[int]) -> TokenTree:
    """Makes a `TokenTree` of a tree that the head has grown, or of its first nodes.

    Args:
        words: For each node, the mask of the rows of its request that it sees (`draft_tree`).
    """
    return TokenTree(tokens, [parent_of(word, row) for row, word in enumerate(words, 1)])


class EagerTrees:
    """Grows trees without graphs, for steps whose start the host knows.

    Args:
        table: Page numbers by slot.
    """

    def __init__(
        self, model: DraftedModel, pool: torch.Tensor, table: PageTable, page_size: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._table = table
        self._page_size = page_size
        self._copies = DeviceCopies(pool.device)

    def grow(
        self, lasts: LastTokens, limits: Int64Array, depths: Int64Array, shape: DraftShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Grows trees from last tokens, and waits for them.

        Args:
            limits: [R]: first position at which each request has no page.
            depths: [R]: levels of each request's tree.

        Returns:
            Tokens and ancestor masks, [nodes, R], on the host.
        """
        (slots, starts, tokens), size = lasts, self._page_size
        count = len(slots)
        num_places = 1 + shape.width * (shape.depth - 1)
        wanted = starts[:, None] + np.arange(num_places)
        is_there = wanted < limits[:, None]
        positions = np.minimum(wanted, limits[:, None] - 1)
        places = self._table.pages[slots[:, None], positions // size].astype(np.int64)
        places = np.where(is_there, places * size + positions % size, 0)
        # Nodes without a place in the request's pages write to the null page.
        num_pages = max(int(positions.max()), num_places) // size + 1
        pages = np.zeros((count, num_pages), np.int32)
        known = self._table.pages[slots, :num_pages]
        pages[:, : known.shape[1]] = known
        each = np.arange(count + 1, dtype=np.int32)
        columns = (slots, tokens, starts, depths, places.T, limits, each, pages)
        sent = self._copies.send(columns)
        device_slots, token_ids, device_starts, max_depths, device_places, ends, *rest = sent
        trees = DraftTrees(
            width=shape.width,
            depth=shape.depth,
            num_nodes=shape.num_drafts,
            starts=device_starts,
            slots=device_places.view(num_places, count),
            is_whole=device_starts + num_places <= ends,
            max_depths=max_depths,
            page_table=rest[1].view(count, num_pages),
            cu_q_lens=rest[0],
            max_kv_len=num_pages * size,
        )
        head = self._model.head
        assert isinstance(head, Eagle3Head), "only EAGLE-3 heads grow trees"
        state = self._model.kept.index_select(0, device_slots)
        found = head.tree(state, token_ids, trees, self._pool)
        both = torch.stack(found).cpu()
        return both[0], both[1]
