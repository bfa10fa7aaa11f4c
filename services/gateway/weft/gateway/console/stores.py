"""The KV stores that workers name, asked for their state while somebody watches."""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

import grpc
from weft.common.mesh import NOT_ASKED
from weft.common.rpc.channel import open_channel
from weft.common.rpc.tls import Identity
from weft.gateway.fleet.fleet import Fleet
from weft.v1 import kvstore_pb2, kvstore_pb2_grpc

_ASK_EVERY_S = 2.0
_TIMEOUT_S = 1.5


class StoreState(NamedTuple):
    """A KV store as it answered last."""

    info: kvstore_pb2.GetStoreInfoResponse | None
    """The store's facts; None: it has never answered."""
    stats: kvstore_pb2.StatsResponse | None
    """The store's pages and counters; None: it does not answer now."""
    problem: str = ""


class StoreWatch:
    """Asks the stores that workers name, again and again."""

    def __init__(self, fleet: Fleet, identity: Identity | None) -> None:
        self._fleet = fleet
        self._identity = identity
        self.states: dict[str, StoreState] = {}
        """State of each store, by its address."""

    def addresses(self) -> list[str]:
        """Addresses of the stores that workers name now."""
        infos = (worker.info for worker in self._fleet.workers())
        return list(dict.fromkeys(at for info in infos if info is not None for at in info.kvstores))

    def ids(self) -> dict[str, str]:
        """Ids of the known stores, by address."""
        return {
            address: state.info.store_id
            for address, state in self.states.items()
            if state.info is not None
        }

    async def ask_once(self) -> None:
        """Asks every store, whoever watches."""
        self._drop_unnamed()
        async with contextlib.AsyncExitStack() as stack:
            channels = {
                address: await stack.enter_async_context(
                    open_channel(address, "kvstore", self._identity)
                )
                for address in self.addresses()
            }
            await asyncio.gather(*(self._ask(*item) for item in channels.items()))

    def forget(self) -> None:
        """Keeps only the facts of the stores that are still named: nobody has asked for their state
        lately.
        """
        self._drop_unnamed()
        self.states = {
            address: StoreState(state.info, None, NOT_ASKED)
            for address, state in self.states.items()
        }

    def state(self, address: str) -> StoreState:
        """A store as it answered last."""
        return self.states.get(address, StoreState(None, None, NOT_ASKED))

    async def run(self) -> None:
        channels: dict[str, grpc.aio.Channel] = {}
        try:
            while True:
                addresses = self.addresses()
                for address in [known for known in channels if known not in addresses]:
                    await channels.pop(address).close()
                self._drop_unnamed()
                for address in addresses:
                    if address not in channels:
                        channels[address] = open_channel(address, "kvstore", self._identity)
                await asyncio.gather(*(self._ask(one, channels[one]) for one in addresses))
                await asyncio.sleep(_ASK_EVERY_S)
        finally:
            for channel in channels.values():
                await channel.close()

    def _drop_unnamed(self) -> None:
        for address in self.states.keys() - set(self.addresses()):
            del self.states[address]

    async def _ask(self, address: str, channel: grpc.aio.Channel) -> None:
        stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
        info = self.state(address).info
        try:
            info = await stub.GetStoreInfo(kvstore_pb2.GetStoreInfoRequest(), timeout=_TIMEOUT_S)
            stats = await stub.Stats(kvstore_pb2.StatsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            self.states[address] = StoreState(info, None, f"does not answer: {error.code().name}")
        else:
            self.states[address] = StoreState(info, stats)
