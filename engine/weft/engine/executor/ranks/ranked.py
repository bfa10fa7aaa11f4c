"""The executor of rank 0, which makes all ranks run its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.contract.pages import PageCopy
from weft.engine.base.device_copies import Mark
from weft.engine.executor.drafts.eager_chains import Chains, LastTokens
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.port import Launched
from weft.engine.executor.ranks.frames import (
    NO_PAGES,
    NewPages,
    encode_barrier,
    encode_chains,
    encode_copies,
    encode_draw,
    encode_pages,
    encode_shared,
    encode_step,
    encode_tokens,
)
from weft.engine.executor.ranks.start import Ranks
from weft.engine.executor.step_input import StepInput
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.sampling.device_draws import CapturedDraw, Way
from weft.engine.sampling.pending import PendingTokens


class _RankedChains:
    def __init__(self, chains: Chains, executor: RankedExecutor) -> None:
        self._chains, self._executor = chains, executor

    def run(self, lasts: LastTokens, counts: Int64Array) -> torch.Tensor:
        return self._executor.run_chains(self._chains, lasts, counts)


class RankedExecutor(LocalExecutor):
    """The executor of rank 0's share, which makes the other ranks run the same steps.

    Before `lead` every rank runs the same code by itself. On a CPU all ranks write to one pool, and
    a step has ended on every rank when `launch` returns. Therefore only rank 0 reads or writes
    whole pages between steps.
    """

    _ranks: Ranks | None = None

    def lead(self, ranks: Ranks) -> None:
        """From now on all other ranks run the frames that this executor sends."""
        self._ranks = ranks
        self._num_sent = np.zeros(self.page_table.null_row, np.int64)
        """Entries of each slot's page table row that the other ranks have."""
        self._num_additions_sent = 0
        """`PageTable.num_additions` when entries were sent last."""

    def launch(self, step: StepInput) -> Launched:
        """Raises RanksLost if a rank is gone, or if this rank fails while the other ranks continue
        with the step.
        """
        if self._ranks is None:
            return super().launch(step)
        group = self._ranks.group
        group.post(encode_step(step, self._new_pages()))
        try:
            launched = super().launch(step)
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in step {group.num_frames}: {error}")
            raise RanksLost(f"rank 0 failed in step {group.num_frames}: {error}") from error
        if not self.is_asynchronous:
            group.await_ended()
        logits = launched.logits
        if logits is not None and logits.captured is not None:
            captured = partial(self._draw_on_all, logits.captured)
            launched = launched._replace(logits=logits._replace(captured=captured))
        return launched

    def chains(self, model: DraftedModel) -> Chains:
        own = super().chains(model)
        return own if self.num_ranks == 1 else _RankedChains(own, self)

    def run_chains(self, chains: Chains, lasts: LastTokens, counts: Int64Array) -> torch.Tensor:
        """Raises RanksLost as `launch` does."""
        if self._ranks is None:
            return chains.run(lasts, counts)
        group = self._ranks.group
        group.post(encode_chains(lasts, counts, self._new_pages()))
        try:
            return chains.run(lasts, counts)
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in drafts before step {group.num_frames}: {error}")
            raise RanksLost(self._ranks.group.reason) from error

    def _draw_on_all(
        self, captured: CapturedDraw, way: Way, slot_override: Int64Array | None
    ) -> PendingTokens:
        assert self._ranks is not None
        self._ranks.group.post(encode_draw(way))
        return captured(way, slot_override)

    def keep(self, tokens: torch.Tensor) -> None:
        if self._ranks is not None and self._peers is None:
            self._ranks.group.post(encode_tokens(tokens.numpy()))
        elif self._ranks is not None and self._peers is not None:
            self._ranks.group.post(encode_shared(len(tokens)))
            tokens = self._peers.share_tokens(tokens.to(self.device, non_blocking=True))
        super().keep(tokens)

    def mark(self) -> Mark:
        is_shared = self._maps_pools or self._lora is not None
        if self._ranks is not None and self.is_asynchronous and is_shared:
            self._ranks.group.post(encode_barrier())
            self.meet()
        return super().mark()

    @property
    def works_behind_draws(self) -> bool:
        return self._maps_pools and self._has_head

    @property
    def _maps_pools(self) -> bool:
        return len(self.device_pages.parts) > 1

    def copy(self, copies: Sequence[PageCopy]) -> None:
        if copies and (ranks := self._of_own_pages()):
            ranks.group.post(encode_copies(copies))
        super().copy(copies)

    def zero(self, pages: Sequence[int], group: int = 0) -> None:
        if pages and (ranks := self._of_own_pages()):
            ranks.group.post(encode_pages("zero", pages))
        super().zero(pages, group)

    def poison(self, pages: Sequence[int], group: int = 0) -> None:
        if pages and (ranks := self._of_own_pages()):
            ranks.group.post(encode_pages("poison", pages))
        super().poison(pages, group)

    def poison_blocks(self, blocks: Sequence[int]) -> None:
        if blocks and (ranks := self._of_own_pages()):
            ranks.group.post(encode_pages("poison_blocks", blocks))
        super().poison_blocks(blocks)

    def reset_slot(self, slot: int) -> None:
        if self._ranks is not None:
            self._num_sent[slot] = 0
        super().reset_slot(slot)

    def check(self) -> None:
        if self._ranks is not None:
            self._ranks.check()

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
        if self._peers is not None:
            self._peers.close()

    def _of_own_pages(self) -> Ranks | None:
        """None: all ranks share one pool."""
        return self._ranks if self.is_asynchronous else None

    def _new_pages(self) -> NewPages:
        table = self.page_table
        if table.num_additions == self._num_additions_sent:
            return NO_PAGES
        self._num_additions_sent = table.num_additions
        slots = np.flatnonzero(table.num_pages > self._num_sent)
        firsts, ends = self._num_sent[slots], table.num_pages[slots]
        self._num_sent[slots] = ends
        if (ends - firsts == 1).all():
            pages = table.pages[slots, firsts]
        else:
            rows = zip(slots.tolist(), firsts.tolist(), ends.tolist(), strict=True)
            pages = np.concatenate([table.pages[slot, first:end] for slot, first, end in rows])
        return NewPages(slots, firsts, ends, pages.astype(np.int64))
