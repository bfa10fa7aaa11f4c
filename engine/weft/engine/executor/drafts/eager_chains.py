"""Chains of drafts without graphs, for steps whose start the host knows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import DeviceCopies
from weft.engine.executor.rotations import SlotRotations
from weft.engine.model.heads.drafted import DraftedModel
from weft.kernels.ops.draft_head.spec import DraftChains
from weft.pages.memory.page_table import PageTable


class LastTokens(NamedTuple):
    """Requests to draft for, whose last tokens the host knows. Their pages are in the table."""

    slots: Int64Array
    starts: Int64Array
    """[R]: positions of the last tokens."""
    tokens: Int64Array
    """[R]: the last tokens."""


class Chains(Protocol):
    """Makes chains of drafts for requests whose last tokens the host knows."""

    def run(self, lasts: LastTokens, counts: Int64Array) -> torch.Tensor: ...


class EagerChains:
    """Runs a head once per draft, for many requests at once.

    The first draft continues from the states that the target's last step kept for a request, the
    later ones from the head's own states. The target's next step overwrites the KV that the head
    wrote for the drafts.

    Args:
        table: Page numbers by slot.
        rotations: Rotations of slots with images; None: there are none.
    """

    def __init__(
        self,
        model: DraftedModel,
        pool: torch.Tensor,
        table: PageTable,
        page_size: int,
        rotations: SlotRotations | None = None,
    ) -> None:
        self._rotations = rotations
        self._model = model
        self._pool = pool
        self._table = table
        self._page_size = page_size
        self._copies = DeviceCopies(pool.device)

    def run(self, lasts: LastTokens, counts: Int64Array) -> torch.Tensor:
        """Drafts, [D, R] on the device. The first `counts[r]` rows of column r are valid.

        Args:
            counts: [R]: drafts of each request, descending. Requests that have enough drafts leave
                the batch from its end.
        """
        slots, starts, tokens = lasts
        depth, rows = int(counts[0]), len(slots)
        # A request with fewer drafts than others repeats its last position. It has left the batch
        # by then, so nothing is computed for it.
        done = np.arange(depth)[:, None]
        positions = starts + np.minimum(done, counts - 1)
        num_pages = int(positions.max()) // self._page_size + 1
        pages = self._table.pages[slots, :num_pages]
        places = pages[np.arange(rows), positions // self._page_size].astype(np.int64)
        places = places * self._page_size + positions % self._page_size
        lengths, each = (positions + 1).astype(np.int32), np.arange(rows + 1, dtype=np.int32)
        columns = (slots, tokens, positions, places, lengths, each, pages)
        device_slots, token_ids, *sent, one_row_each, page_table = self._copies.send(columns)
        device_positions, device_places, kv_lens = (column.view(depth, rows) for column in sent)
        turned_by = None
        if self._rotations is not None:
            turned_by = self._rotations.of_chains(device_positions, device_slots)
        chains = DraftChains(
            positions=device_positions,
            slots=device_places,
            kv_lens=kv_lens,
            counts=(counts > done).sum(axis=1).tolist(),
            page_table=page_table.view(rows, num_pages),
            one_row_each=one_row_each,
            max_kv_len=num_pages * self._page_size,
            turned_by=turned_by,
        )
        state = self._model.kept.index_select(0, device_slots)
        return self._model.head.chain(state, token_ids, chains, self._pool)
