"""Sends the engine's lookups and puts to the KV store's replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

from weft.common.tasks import start_logged
from weft.common.worker.engine_client import EngineClient
from weft.common.worker.store_replica import StoredRange, StoreReplica
from weft.contract import faults
from weft.contract.errors import InjectedFault, PeerUnavailable
from weft.contract.messages import Inbox, Outbox
from weft.contract.store import (
    StoreAnswer,
    StoreHeld,
    StoreHold,
    StoreLookup,
    StorePut,
    StorePutResult,
    StoreSegment,
)
from weft.engine.base.shards import ranked, stretches


class _PageRange(NamedTuple):
    """Consecutive pages of a prompt that one replica should have."""

    replica: StoreReplica
    first: int
    end: int


class StoreClient:
    """A worker's client of its KV store. An unreachable replica is a miss, never an error.

    While a replica is away, its pages belong to the next replica in their order. `engine` receives
    the answers; there is at least one replica.
    """

    def __init__(self, engine: EngineClient, replicas: Sequence[StoreReplica]) -> None:
        self._engine = engine
        self._replicas = {replica.address: replica for replica in replicas}
        self._names = list(self._replicas)
        self._tasks: set[asyncio.Task[None]] = set()
        self._holds: dict[int, asyncio.Task[None]] = {}

    def on_outbox(self, outbox: Outbox) -> None:
        """Carries out what the engine wants of the store, without waiting."""
        for lookup in outbox.store_lookups:
            self.look_up(lookup)
        for put in outbox.store_puts:
            self.put(put)
        for hold in outbox.store_holds:
            self.hold(hold)
        for number in outbox.store_releases:
            self.release(number)

    def look_up(self, lookup: StoreLookup) -> None:
        """Asks the store; the engine always gets an answer."""
        self._spawn(self._look_up(lookup))

    def put(self, put: StorePut) -> None:
        """Offers pages; the engine always gets a result."""
        self._spawn(self._put(put))

    def hold(self, hold: StoreHold) -> None:
        """Has a replica keep pages still until `release`; the engine always gets an answer."""
        self._holds[hold.hold] = self._spawn(self._hold(hold))

    def release(self, number: int) -> None:
        if (task := self._holds.pop(number, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Cancels the calls in progress."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = start_logged(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _replica_of(self, shard: bytes, *, is_put: bool) -> StoreReplica | None:
        """None: none is reachable."""
        for name in ranked(self._names, shard):
            replica = self._replicas[name]
            if not (replica.is_away if is_put else replica.is_resting):
                return replica
        return None

    async def _look_up(self, lookup: StoreLookup) -> None:
        answer = StoreAnswer(lookup=lookup.lookup)
        point = faults.STORE_LOOKUP
        if not (point.is_armed and await _is_lost(point)):
            answer = await self._ask(lookup)
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(store_answers=[answer]))

    async def _ask(self, lookup: StoreLookup) -> StoreAnswer:
        parts: list[_PageRange] = []
        num_keys = len(lookup.keys)
        for first, end in [(0, num_keys)] if lookup.block_pages else stretches(num_keys):
            replica = self._replica_of(lookup.keys[first], is_put=False)
            if replica is None:
                break
            parts.append(_PageRange(replica, first, end))
        asked = list({part.replica.address: part.replica for part in parts}.values())
        answers = await asyncio.gather(
            *(replica.look_up(lookup, _keys_of(replica, parts, lookup.keys)) for replica in asked)
        )
        held = {replica.address: held for replica, held in zip(asked, answers, strict=True) if held}
        return StoreAnswer(
            lookup=lookup.lookup,
            segments=_segments(parts, held),
            epochs={address: answer.epoch for address, answer in held.items()},
        )

    async def _put(self, put: StorePut) -> None:
        result = StorePutResult(put=put.put, is_answered=False)
        point = faults.STORE_PUT
        if not (point.is_armed and await _is_lost(point)):
            result = await self._offer(put)
        with contextlib.suppress(PeerUnavailable):
            self._engine.send(Inbox(store_put_results=[result]))

    async def _hold(self, order: StoreHold) -> None:
        replica = self._replicas.get(order.address)
        is_answered = False
        try:
            if replica is not None:
                async for held in replica.hold(order):
                    is_answered = True
                    self._engine.send(Inbox(store_held=[held]))
        except PeerUnavailable:
            return  # This worker's engine has ended.
        finally:
            if not is_answered:
                with contextlib.suppress(PeerUnavailable):
                    self._engine.send(Inbox(store_held=[StoreHeld(hold=order.hold)]))

    async def _offer(self, put: StorePut) -> StorePutResult:
        indices: dict[str, list[int]] = {}
        is_complete = True
        for index, shard in enumerate(put.shards):
            replica = self._replica_of(shard, is_put=True)
            if replica is None:
                is_complete = False
            else:
                indices.setdefault(replica.address, []).append(index)
        results = await asyncio.gather(
            *(self._replicas[address].put(put, wanted) for address, wanted in indices.items())
        )
        answered = [stored for stored in results if stored is not None]
        return StorePutResult(
            put=put.put,
            is_answered=is_complete and len(answered) == len(results),
            stored_pages=sum(stored.num_pages for stored in answered),
            wants_data=any(stored.wants_data for stored in answered),
        )


def _keys_of(
    replica: StoreReplica, parts: Iterable[_PageRange], keys: Sequence[bytes]
) -> list[bytes]:
    return [key for part in parts if part.replica is replica for key in keys[part.first : part.end]]


def _segments(parts: Sequence[_PageRange], held: dict[str, StoredRange]) -> list[StoreSegment]:
    """Pages after a gap are left out; neighbouring pages of one replica are one segment."""
    segments: list[StoreSegment] = []
    left = {address: answer.num_pages for address, answer in held.items()}
    for part in parts:
        address = part.replica.address
        num_pages = min(left.get(address, 0), part.end - part.first)
        if num_pages:
            left[address] -= num_pages
            if segments and segments[-1].address == address:
                segments[-1].num_pages += num_pages
            else:
                answer = held[address]
                segments.append(
                    StoreSegment(
                        num_pages=num_pages,
                        store_id=answer.store_id,
                        address=address,
                        epoch=answer.epoch,
                    )
                )
        if num_pages < part.end - part.first:
            break
    return segments


async def _is_lost(point: faults.FaultPoint) -> bool:
    """Passes a fault point; returns whether the call to the store is dropped."""
    try:
        return await point.fire_async() == "drop"
    except InjectedFault:
        return True
