"""Replays a record of routing through the policies (`weft.gateway.routing.record`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
from weft.contract.errors import ConfigError
from weft.gateway.routing.base import Choice, Policy, PolicyOptions
from weft.gateway.routing.record import (
    COLUMNS,
    AnyLine,
    Cleared,
    Flushed,
    Members,
    PagesReported,
    Queried,
    Routed,
    Started,
)
from weft.gateway.routing.view import PoolView, RoutingRequest

_decoder = msgspec.json.Decoder(AnyLine)
_INDEX_CALLS = frozenset({"replace", "add", "remove"})


class ReplayedChoice(NamedTuple):
    """One choice, as recorded and as replayed."""

    pool: str
    request_id: str
    recorded: list[Choice]
    replayed: list[Choice]

    @property
    def is_same(self) -> bool:
        """Whether both name the same workers in the same order, believed to hold the same."""
        return self.recorded == self.replayed


def read_record(path: Path) -> Iterator[AnyLine]:
    """Reads the lines of a record; a truncated last one is ignored.

    Raises:
        ConfigError: A line is not one of a record; the message says which.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise ConfigError(f"{path}, line {number}: not of a record: {error}") from error


class _Pool:
    """One pool of a record: its policy, and the view that it is shown next."""

    def __init__(self, began: Started, make: Callable[[str, PolicyOptions], Policy]) -> None:
        self.now = 0.0
        options = PolicyOptions(**began.options, clock=lambda: self.now)
        self.policy = make(began.policy, options)
        self.view = PoolView(())

    def choose(self, line: Routed) -> list[Choice]:
        self.now = line.now
        for name in COLUMNS:
            getattr(self.view, name)[:] = line.columns.get(name, 0)
        return self.policy.choose(self.view, _request(line.request), line.count)

    def tell(self, line: PagesReported) -> None:
        index = self.policy.index
        if index is None:  # The choice is of a policy that replaces the recorded one.
            return
        if line.how in _INDEX_CALLS:
            getattr(index, line.how)(line.worker_id, line.epoch, line.keys)
        else:
            index.forget(line.worker_id)


def replay(
    lines: Iterable[AnyLine], make: Callable[[str, PolicyOptions], Policy]
) -> Iterator[ReplayedChoice]:
    """Gives policies their recorded inputs again.

    Args:
        lines: Lines of a record, from its beginning.
        make: Makes the policies; `make_policy`, or something that makes others to compare.

    Yields:
        Every choice.

    Raises:
        ConfigError: A pool's first line is missing.
    """
    pools: dict[str, _Pool] = {}
    for line in lines:
        if isinstance(line, Started):
            pools[line.pool] = _Pool(line, make)
            continue
        if line.pool not in pools:
            raise ConfigError(f"the record has no beginning of {line.pool}")
        pool = pools[line.pool]
        match line:
            case Routed():
                recorded = [Choice(*pair) for pair in line.chosen]
                yield ReplayedChoice(
                    line.pool, line.request.request_id, recorded, pool.choose(line)
                )
            case Members():
                pool.view = PoolView(line.workers)
            case PagesReported():
                pool.tell(line)
            case Cleared():
                if pool.policy.index is not None:
                    pool.policy.index.clear()
            case Flushed():
                pool.policy.flush()


def _request(asked: Queried) -> RoutingRequest:
    return RoutingRequest(
        request_id=asked.request_id,
        prompt_ids=asked.prompt_ids,
        cache_salt=asked.cache_salt,
        routing_key=asked.routing_key,
        prefill_host=asked.prefill_host,
        first_token_s=asked.first_token_s,
        adapter=asked.adapter,
    )
