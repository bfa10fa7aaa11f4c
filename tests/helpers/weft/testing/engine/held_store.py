"""A KV store whose pages an engine reads from another process's memory."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable

import numpy as np
from weft.contract.messages import Outbox
from weft.contract.store import StoreHeld, StoreHold
from weft.engine.loop.engine import Engine
from weft.pages.transfer.digest import digest_pages
from weft.pages.transfer.nixl_binding import nixl_version
from weft.testing.engine.engine_pair import ManualClock
from weft.testing.engine.held_arena import NUM_PAGES, serve
from weft.testing.engine.store_pair import StorePair


class HeldStorePair(StorePair):
    """An owner of a model without windows and such a store.

    `on_held` may change an answer to a hold, or leave it out.
    """

    def __init__(self, owner: Engine, clock: ManualClock, num_new: int) -> None:
        super().__init__(owner, clock, 1, num_new)
        self.on_held: Callable[[StoreHeld], StoreHeld | None] = lambda held: held
        self.holds: set[int] = set()
        """Open ones."""
        self.num_holds = 0
        self._context = multiprocessing.get_context("spawn")
        self._places: dict[bytes, int] = {}
        self.begin()

    def begin(self) -> None:
        """Starts the process with the pages that the store holds."""
        self._pipe, there = self._context.Pipe()
        size = self.owner.info.page_bytes
        self.process = self._context.Process(target=serve, args=(there, size), daemon=True)
        self.process.start()
        there.close()
        self._target: tuple[int, str, bytes] = self._pipe.recv()
        self._places.clear()
        for key in self.held:
            self._put(key)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        super().close()
        self.kill()

    def forget_all(self) -> None:
        """The store has nothing any more."""
        self.held.clear()
        self._places.clear()

    def spoil(self, page: int) -> None:
        """Changes a bit of a page in the arena alone."""
        (key,) = [key for key, place in self._places.items() if place == page]
        data = bytearray(self.held[key])
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        self._write(page, bytes(data))

    def blocks_of(self, key: bytes) -> list[bytes]:
        return []

    def _put(self, key: bytes) -> None:
        page = self._places.setdefault(key, len(self._places) + 1)
        assert page < NUM_PAGES, "the arena is full"
        self._write(page, self.held[key])

    def _write(self, page: int, data: bytes) -> None:
        self._pipe.send((page, data))
        self._pipe.recv()

    def _take_owner(self, outbox: Outbox) -> None:
        super()._take_owner(outbox)
        if self.process.is_alive():  # Otherwise `begin` puts what is held by then.
            for key in self.held.keys() - self._places.keys():
                self._put(key)
        for hold in outbox.store_holds:
            self.num_holds += 1
            self.holds.add(hold.hold)
            if (held := self.on_held(self._held(hold))) is not None:
                self.send(store_held=[held])
        self.holds.difference_update(outbox.store_releases)

    def _held(self, hold: StoreHold) -> StoreHeld:
        address, name, metadata = self._target
        pages = [np.frombuffer(self.held[key], np.uint8) for key in hold.keys]
        return StoreHeld(
            hold=hold.hold,
            arena_address=address,
            page_bytes=self.owner.info.page_bytes,
            pages=[self._places[key] for key in hold.keys],
            digests=[int(digest_pages(page[None], [0])[0]) for page in pages],
            nixl_version=nixl_version(),
            agent_name=name,
            agent_metadata=metadata,
        )
