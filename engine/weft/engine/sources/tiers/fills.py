"""Decides how an admitted request continues if there are tiers, which precede other fillers."""

from __future__ import annotations

from collections.abc import Callable

from weft.engine.requests.request import Request, State
from weft.engine.sources.owner import OwnerFills
from weft.engine.sources.store_layers import StoreLoads
from weft.engine.sources.tiers.tiers import Tiers
from weft.pages.tiers.policy import LoadCost, TierPolicy


class TieredFills:
    """Implements the scheduler's `Fills`: own tiers first, then KV store, then prefill workers.

    Args:
        tiers: Tiers of this engine; None: there are none.
        store_loads: Loads by layer from KV stores; None: their pages are filled whole.
        owner: Requests fills from KV store and prefill workers.
        prefill_tokens_per_s: Returns the measured local rate; 0: unknown.
    """

    def __init__(
        self,
        tiers: Tiers | None,
        store_loads: StoreLoads | None,
        owner: OwnerFills,
        policy: TierPolicy,
        page_bytes: int,
        page_size: int,
        prefill_tokens_per_s: Callable[[], float],
    ) -> None:
        self._tiers = tiers
        self._store_loads = store_loads
        self._owner = owner
        self._policy = policy
        self._token_bytes = page_bytes / page_size
        self._page_bytes = page_bytes
        self._prefill_rate = prefill_tokens_per_s

    def next_state(self, request: Request) -> State:
        if request.held.incoming is not None:
            return State.PREFILLING
        if self._tiers is not None and self._tiers.plan(request):
            return State.LOADING
        self._pass_over_stores(request)
        if self._store_loads is not None and self._store_loads.plan(request):
            return State.LOADING
        return self._owner.next_state(request)

    def has_room(self, request: Request) -> bool:
        return self._owner.has_room(request)

    def start(self, request: Request) -> bool:
        if self._tiers is not None and self._tiers.start(request):
            return True
        if self._store_loads is not None and self._store_loads.start(request):
            return True
        return self._owner.start(request)

    def abandon(self, request: Request) -> None:
        if self._tiers is not None and self._tiers.abandon(request):
            return
        if self._store_loads is not None and self._store_loads.abandon(request):
            return
        self._owner.abandon(request)

    def _pass_over_stores(self, request: Request) -> None:
        """Drops stores that lack the request's next page, or are slower than computing."""
        while request.sources.candidates and request.sources.candidates[0].kind == "kvstore":
            store = request.sources.candidates[0]
            num_tokens = store.match_tokens - request.num_computed
            if num_tokens > 0 and store.first_token <= request.num_computed:
                num_bytes = int(num_tokens * self._token_bytes)
                num_bytes += self._owner.num_more(request, store.match_tokens) * self._page_bytes
                cost = LoadCost("store", num_tokens, num_bytes)
                if self._policy.num_loaded([cost], self._prefill_rate()):
                    return
            request.sources.candidates.pop(0)
