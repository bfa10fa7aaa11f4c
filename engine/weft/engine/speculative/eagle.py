"""Drafts from an EAGLE-3 head: a chain of its most likely tokens behind a request's last one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from weft.engine.device_copies import DeviceCopies
from weft.engine.runner.step import PageTable
from weft.engine.scheduler.plan import VerifyItem
from weft.engine.speculative.drafted import DraftedModel
from weft.kernels.draft_head import DraftChains


class EagleDrafter:
    """Runs the head of a drafted model, one step for each token, for many requests at once.

    The first step goes on from what the target's last step kept of a request; the later ones from
    the head's own states. Their entries in the pages are written anew by the target's step.

    Args:
        model: Target and head.
        pool: The target's.
        table: Page numbers by slot; the requests' pages are entered.
        page_size: Token positions a page.
    """

    def __init__(
        self, model: DraftedModel, pool: torch.Tensor, table: PageTable, page_size: int
    ) -> None:
        self._model = model
        self._pool = pool
        self._table = table
        self._page_size = page_size
        self._copies = DeviceCopies(pool.device)

    def draft(self, items: Sequence[VerifyItem]) -> list[list[int]]:
        """See `Drafter.draft`; as many tokens as may be. Waits for the device once, at the end."""
        # Those that get most first: the others leave the batch from its end.
        order = sorted(range(len(items)), key=lambda index: -items[index].max_drafts)
        order = [index for index in order if items[index].max_drafts > 0]
        drafts: list[list[int]] = [[] for _ in items]
        if order:
            chains = self._chains([items[index] for index in order])
            for index, chain in zip(order, chains, strict=True):
                drafts[index] = chain[: items[index].max_drafts]
        return drafts

    def forget(self, slot: int) -> None:
        """See `Drafter.forget`: what is kept of a slot is written anew by its next request."""

    def _chains(self, items: Sequence[VerifyItem]) -> list[list[int]]:
        """Of each its tokens, with what is left of the longest behind them."""
        depth, rows = items[0].max_drafts, len(items)
        allowed = np.array([item.max_drafts for item in items])
        counts = [int((allowed > done).sum()) for done in range(depth)]
        columns = self._columns(items, depth)
        slots, tokens, positions, places, lengths, each, pages = self._copies.send(columns)
        table = pages.view(rows, -1)
        chains = DraftChains(
            positions=positions.view(depth, rows),
            slots=places.view(depth, rows),
            kv_lens=lengths.view(depth, rows),
            counts=counts,
            page_table=table,
            one_row_each=each,
            max_kv_len=table.shape[1] * self._page_size,
        )
        with torch.inference_mode():
            found = self._model.head.chain(
                self._model.kept.index_select(0, slots), tokens, chains, self._pool
            )
        drafts: list[list[int]] = found.cpu().t().tolist()
        return drafts

    def _columns(self, items: Sequence[VerifyItem], depth: int) -> list[npt.NDArray[np.generic]]:
        """Slots and last tokens by request; positions, places in the pool and lengths [depth, R];
        0 .. R; page numbers [R, pages of the longest]."""
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
        places = pages[np.arange(len(items)), positions // self._page_size].astype(np.int64)
        places = places * self._page_size + positions % self._page_size
        lengths, each = (positions + 1).astype(np.int32), np.arange(len(items) + 1, dtype=np.int32)
        return [slots, tokens, positions, places, lengths, each, pages]
