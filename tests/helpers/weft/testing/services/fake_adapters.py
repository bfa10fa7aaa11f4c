"""An engine's part in loading adapters, scripted; who follows the registry is the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from weft.common.adapters.registry import Registry
from weft.common.worker.adapters import AdapterFollower, AdapterNews
from weft.contract.adapters import AdapterOrder, AdapterPlace, AdapterReply, AdapterState
from weft.contract.messages import Inbox, Outbox
from weft.contract.submits import Failure

POLL_S = 0.02

LEFT_OUT = ("base_model.model.model.norm.weight",)
"""Of adapters that are read leniently."""


class FakeAdapters:
    """Obeys the orders of a follower.

    Args:
        root: Adapter root.
        model: ServedModel name.
        num_using: Tells how many requests use a content.
    """

    def __init__(self, root: Path, model: str, num_using: Callable[[bytes], int]) -> None:
        self.follower = AdapterFollower(Registry(root), model, self._send, POLL_S)
        self._num_using = num_using
        self.orders: list[AdapterOrder] = []
        self.states: dict[bytes, AdapterState] = {}
        self._told: dict[bytes, AdapterState] = {}
        self.problem: Callable[[AdapterOrder], str] = lambda order: ""
        """Why a load fails; empty: it succeeds."""
        self.delay_s = 0.0
        self.is_stuck = False
        """Whether orders are left unanswered."""
        self.place: AdapterPlace = "device"
        """Place that loaded adapters get."""
        self._tasks = [asyncio.create_task(self.follower.run())]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def generation(self) -> int:
        return self.follower.generation

    def news(self, sequence: int | None) -> AdapterNews:
        """The follower's news, after a report of what has changed."""
        for digest, state in self.states.items():
            state.num_requests = self._num_using(digest)
        now = {digest: replace(state) for digest, state in self.states.items()}
        changed = [state for digest, state in now.items() if self._told.get(digest) != state]
        gone = [digest for digest in self._told if digest not in now]
        self._told = now
        load: Any = SimpleNamespace(adapters=changed, gone_adapters=gone)
        self.follower.on_outbox(Outbox(load=load))
        return self.follower.news(sequence)

    def _send(self, inbox: Inbox) -> None:
        for order in inbox.adapter_orders:
            self.orders.append(order)
            self._tasks.append(asyncio.create_task(self._obey(order)))

    async def _obey(self, order: AdapterOrder) -> None:
        while self.is_stuck:
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.delay_s)
        failure = None
        if order.action == "unload":
            state = self.states.get(order.digest)
            while state is not None and self._num_using(order.digest):
                state.is_unloading = True
                await asyncio.sleep(0.01)
            self.states.pop(order.digest, None)
        elif problem := self.problem(order):
            failure = Failure(reason="ADAPTER_INVALID", message=problem)
        else:
            self.states[order.digest] = AdapterState(
                digest=order.digest,
                name=order.name,
                state=self.place,
                rank=8,
                num_bytes=1000,
                is_pinned=order.is_pinned,
                left_out=LEFT_OUT if order.is_lenient else (),
            )
        reply = AdapterReply(query=order.query, failure=failure)
        self.follower.on_outbox(Outbox(adapter_replies=[reply]))
