"""The executor of rank 0, which makes all ranks run its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.engine.base.device_copies import Mark
from weft.engine.executor.drafts.eager_chains import Chains, LastTokens
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import (
    EncodeMedia,
    Order,
    PackRows,
    PageOrder,
    UnpackRows,
)
from weft.engine.executor.port import Launched
from weft.engine.executor.ranks.frames import (
    NO_PAGES,
    NO_WINDOWS,
    NewPages,
    NewWindows,
    encode_barrier,
    encode_chains,
    encode_draw,
    encode_shared,
    encode_step,
    encode_tokens,
    frame_of_order,
)
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.executor.step_input import StepInput
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.parallel.host_group import HostGroup
from weft.engine.parallel.shared import SharedGroup
from weft.engine.sampling.device_draws import Way
from weft.engine.sampling.pending import PendingTokens
from weft.pages.memory.page_table import PageTable

if TYPE_CHECKING:
    from weft.engine.parallel.device_peers import DevicePeers


def draws_on_all(launched: Launched, group: SharedGroup | HostGroup) -> Launched:
    """What was launched, whose captured drawing the other ranks take part in."""
    logits = launched.logits
    if logits is None or logits.captured is None:
        return launched
    captured = logits.captured

    def draw(way: Way, slot_override: Int64Array | None) -> PendingTokens:
        group.post(encode_draw(way))
        return captured(way, slot_override)

    return launched._replace(logits=logits._replace(captured=draw))


def keep_on_all(
    tokens: torch.Tensor, local: LocalExecutor, peers: DevicePeers, group: SharedGroup | HostGroup
) -> None:
    """`Executor.keep` on all ranks that draw, whose GPUs get the tokens from that of rank 0."""
    group.post(encode_shared(len(tokens)))
    local.keep(peers.share_tokens(tokens.to(local.device, non_blocking=True)))


class _RankedChains:
    def __init__(
        self, chains: Chains, ranks: RankLeader, take_pages: Callable[[], NewPages]
    ) -> None:
        self._chains, self._ranks, self._take_pages = chains, ranks, take_pages

    def run(self, lasts: LastTokens, counts: Int64Array) -> torch.Tensor:
        """Raises RanksLost if a rank is gone, or this one fails while the others continue."""
        group = self._ranks.group
        group.post(encode_chains(lasts, counts, self._take_pages()))
        try:
            return self._chains.run(lasts, counts)
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in drafts before step {group.num_frames}: {error}")
            raise RanksLost(self._ranks.group.reason) from error


def chains_on_all(
    local: LocalExecutor, ranks: RankLeader, take_pages: Callable[[], NewPages]
) -> Callable[[DraftedModel, PageTable], Chains]:
    """`LocalExecutor.chains`, on all ranks that have the head.

    Args:
        take_pages: Returns the entries of the page table that the other ranks lack.
    """
    return lambda model, table: _RankedChains(local.chains(model, table), ranks, take_pages)


class RankedExecutor:
    """Implements `Executor` with the share of rank 0, and makes the other ranks do the same work.

    Until it gets its first step, each rank works alone with its `LocalExecutor`. On a CPU all ranks
    write to one pool, and a step has ended on every rank when `launch` returns. Therefore only rank
    0 reads or writes whole pages between steps.

    Args:
        local: Rank 0's share.
        peers: The ranks' GPUs; None: the ranks are on a CPU.
    """

    def __init__(self, local: LocalExecutor, ranks: RankLeader, peers: DevicePeers | None) -> None:
        self._local = local
        self._ranks = ranks
        self._peers = peers
        self.page_table, self.window_tables = local.page_table, local.window_tables
        self._has_one_pool = peers is None and isinstance(ranks.group, SharedGroup)
        """Whether all ranks write to the pool of rank 0."""
        self._sent_pages = SentPages(local.page_table)
        self.chains = chains_on_all(local, ranks, self._sent_pages.take)
        self._maps_pools = maps_pools = not local.device_pages.is_whole
        self.facts = local.facts._replace(writes_after_draw=maps_pools and local.has_head)
        self._marks_on_all = peers is not None and (maps_pools or local.has_adapters)
        """Whether rank 0 reads or writes the memory of other ranks' devices."""

    def launch(self, step: StepInput) -> Launched:
        """Raises RanksLost if a rank is gone, or if this rank fails while the other ranks continue
        with the step.
        """
        group = self._ranks.group
        group.post(encode_step(step, self._sent_pages.take(), changes_of(self.window_tables)))
        try:
            launched = self._local.launch(step)
        except Exception as error:
            self._ranks.fail(f"rank 0 failed in step {group.num_frames}: {error}")
            raise RanksLost(f"rank 0 failed in step {group.num_frames}: {error}") from error
        if self._peers is None:
            group.await_ended()
        return draws_on_all(launched, group)

    def keep(self, tokens: torch.Tensor) -> None:
        if self._peers is not None:
            keep_on_all(tokens, self._local, self._peers, self._ranks.group)
            return
        self._ranks.group.post(encode_tokens(tokens.numpy()))
        self._local.keep(tokens)

    def mark(self) -> Mark:
        if self._marks_on_all:
            self._meet()
        return self._local.mark()

    def _meet(self) -> None:
        self._ranks.group.post(encode_barrier())
        self._local.meet()

    def order(self, order: Order) -> None:
        if self._maps_pools and (isinstance(order, PackRows) or self._local.lies_on_all(order)):
            # Rank 0 copies between pages and pieces in the memory of all devices.
            self._meet()
            self._local.order(order)
            self._meet()
            return
        if isinstance(order, EncodeMedia | UnpackRows):
            self._encode(order)
            return
        if not (self._has_one_pool and isinstance(order, PageOrder)):
            self._ranks.group.post(frame_of_order(order))
        self._local.order(order)

    def _encode(self, order: EncodeMedia | UnpackRows) -> None:
        """Raises RanksLost as `launch` does: the other ranks wait for this one's rows."""
        group = self._ranks.group
        group.post(frame_of_order(order))
        try:
            self._local.order(order)
        except Exception as error:
            self._ranks.fail(f"rank 0 failed with images before step {group.num_frames}: {error}")
            raise RanksLost(self._ranks.group.reason) from error

    def check(self) -> None:
        self._ranks.check()

    def close(self) -> None:
        self._ranks.close()
        if self._peers is not None:
            self._peers.close()


def changes_of(tables: Sequence[PageTable]) -> NewWindows:
    """The entries of these page tables that have changed since the last call."""
    begin, entries, pages = 0, list[Int64Array](), list[Int64Array]()
    for table in tables:
        changes = table.take_changes()
        if len(changes.indices):
            entries.append(changes.indices + begin)
            pages.append(changes.pages.astype(np.int64))
        begin += table.pages.size
    return NewWindows(np.concatenate(entries), np.concatenate(pages)) if entries else NO_WINDOWS


class SentPages:
    """What the other ranks have of a page table."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._num_additions = 0
        """`PageTable.num_additions` when entries were sent last."""

    def take(self) -> NewPages:
        """The entries that were not sent yet."""
        table = self._table
        if table.num_additions == self._num_additions:
            return NO_PAGES
        self._num_additions = table.num_additions
        slots = np.flatnonzero(table.num_pages > table.num_sent)
        firsts, ends = table.num_sent[slots], table.num_pages[slots]
        table.num_sent[slots] = ends
        if (ends - firsts == 1).all():
            pages = table.pages[slots, firsts]
        else:
            rows = zip(slots.tolist(), firsts.tolist(), ends.tolist(), strict=True)
            pages = np.concatenate([table.pages[slot, first:end] for slot, first, end in rows])
        return NewPages(slots, firsts, ends, pages.astype(np.int64))
