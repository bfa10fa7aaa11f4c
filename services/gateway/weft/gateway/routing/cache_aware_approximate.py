"""Chooses the worker that was sent the longest part of a prompt, while loads are balanced."""

from __future__ import annotations

from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.sent_pages import SentPages
from weft.gateway.routing.view import PoolView, RoutingRequest


class CacheAwareApproximate(Policy):
    """Needs no reports of cached pages: a prefix that was sent to a worker is assumed to be there.

    In this order, as SGLang's router documents it, with pages in the place of characters:

    1. Loads are out of balance when most and least requests differ by more than
       `balance_abs_threshold` and most is over `balance_rel_threshold` times least: the worker with
       the fewest requests.
    2. The longest match is over `cache_threshold` of the prompt: that worker.
    3. Otherwise: the worker that was sent the fewest pages, which has most room.

    The prompt counts as sent to the first worker of each choice. Every `eviction_interval_s` each
    worker's pages are cut to `max_tree_pages`, the longest unused first.
    """

    def __init__(self, options: PolicyOptions | None = None) -> None:
        super().__init__(options)
        self._sent = SentPages(self.options.max_tree_pages, self.options.eviction_interval_s)

    @property
    def num_pages(self) -> int:
        """Pages remembered, over all workers."""
        return self._sent.index.num_pages

    def choose(self, view: PoolView, request: RoutingRequest, count: int) -> list[Choice]:
        matches = self._sent.index.matches(view, request)
        requests = view.num_requests
        if self._is_uneven(int(requests.max()), int(requests.min())):
            best = self.least(view, count, requests, view.queued_tokens)
        elif int(matches.max()) > self.options.cache_threshold * len(request.prompt_ids):
            best = self.least(view, count, -matches, requests)
        else:
            best = self.least(view, count, self._sent.index.sizes(view), requests)
        self._send(view, best[0], request)
        return [Choice(position, int(matches[position])) for position in best]

    def flush(self) -> int:
        return self._sent.clear()

    def _is_uneven(self, most: int, fewest: int) -> bool:
        return (
            most - fewest > self.options.balance_abs_threshold
            and most > fewest * self.options.balance_rel_threshold
        )

    def _send(self, view: PoolView, position: int, request: RoutingRequest) -> None:
        worker = view.workers[position]
        if worker.page_size:
            num_pages = request.num_useful_pages(worker.page_size)
            keys = request.page_keys(worker).upto(num_pages)[:num_pages]
            self._sent.add(worker, keys, self.options.clock())
