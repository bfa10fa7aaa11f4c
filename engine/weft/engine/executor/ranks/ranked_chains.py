"""Drafts of a head that several ranks have, with the order of rank 0."""

from __future__ import annotations

from collections.abc import Callable

import torch
from weft.contract.arrays import Int64Array
from weft.contract.errors import RanksLost
from weft.engine.executor.drafts.eager_chains import Chains, LastTokens
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.ranks.frames import NewPages, encode_chains
from weft.engine.executor.ranks.leader import RankLeader
from weft.engine.model.heads.drafted import DraftedModel
from weft.pages.memory.page_table import PageTable


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
