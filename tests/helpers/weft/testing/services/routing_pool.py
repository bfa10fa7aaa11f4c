"""Pools of made-up workers for routing policies."""

from __future__ import annotations

from collections.abc import Sequence

from weft.gateway.routing import Choice, PoolView, RoutingRequest, WorkerView

PAGE = 4
MODEL = bytes(range(32))
LAYOUT = "plane=target"


def worker(
    name: str, *, epoch: int = 1, page_size: int = PAGE, host: str = "", total_pages: int = 1000
) -> WorkerView:
    return WorkerView(
        worker_id=name,
        address=name,
        epoch=epoch,
        host=host,
        total_pages=total_pages,
        page_size=page_size,
        model_digest=MODEL,
        kv_layout=LAYOUT,
    )


def pool(
    workers: Sequence[WorkerView] | str,
    requests: Sequence[int] = (),
    queued: Sequence[int] = (),
    tokens: Sequence[int] = (),
) -> PoolView:
    """A view; a text names a worker with each letter, and loads not given are 0."""
    view = PoolView([worker(one) if isinstance(one, str) else one for one in workers])
    view.num_requests[: len(requests)] = requests
    view.queued_tokens[: len(queued)] = queued
    view.num_tokens[: len(tokens)] = tokens
    return view


def ask(ids: Sequence[int], salt: str = "", key: str = "", name: str = "r") -> RoutingRequest:
    return RoutingRequest(request_id=name, prompt_ids=ids, cache_salt=salt, routing_key=key)


def names(view: PoolView, chosen: Sequence[Choice]) -> list[str]:
    return [view.workers[choice.position].worker_id for choice in chosen]
