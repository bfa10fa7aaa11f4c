"""An engine whose pages behind windows are freed beside a KV store, which is a dictionary."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from weft.contract.fills import FillerEvent
from weft.contract.handle import DATA_CHUNK_BYTES, FillEvent, FillTimings, KvHandle
from weft.contract.keys import PageKeys, block_keys
from weft.contract.messages import Outbox
from weft.contract.store import StoreAnswer, StoreLookup, StorePutResult, StoreSegment
from weft.contract.timeline import FillRecord
from weft.engine.loop.engine import Engine
from weft.pages.transfer.digest import digest_pages
from weft.testing.engine.engine_pair import EnginePair, ManualClock

_EPOCH = 7


class StorePair(EnginePair):
    """An owner and a store, which holds what it is given until it is told otherwise.

    Args:
        owner: Its model has a window in some layers, or in all.
        clock: Of the owner.
        window: Length of the window.
        num_new: Tokens of every answer.
    """

    def __init__(self, owner: Engine, clock: ManualClock, window: int, num_new: int) -> None:
        super().__init__(owner, [], clock)
        self._page, self._window, self._num_new = owner.config.page_size, window, num_new
        self.held: dict[bytes, bytes] = {}
        self.is_silent = False
        """It answers no put."""
        self.most_sent: int | None = None
        """Pages of each fill after which it fails; None: none fails."""

    def ask(self, prompt: list[int]) -> list[int]:
        """The answer's tokens."""
        (tokens,) = self.finish(self.submit(prompt, max_tokens=self._num_new))
        return tokens

    def fills(self) -> list[FillRecord]:
        """Fills of the request that finished last."""
        return list(self.answers.values())[-1].finished[-1].timeline.fills

    def forget(self) -> None:
        """The owner has nothing cached, and the store has all that it was offered."""
        self.settle()
        self.owner.memory.flush_cache()
        for memory in self.owner.memories:
            counts = memory.counts()
            assert counts.free == counts.total

    def blocks_of(self, key: bytes) -> list[bytes]:
        """The store's names of what a page of the window's layers takes."""
        layout = self.owner.parts.layout
        own, other = (group.page_bytes(self._page) for group in layout.groups)
        return block_keys(key, -(-other // own))

    def before_windows(self, key: bytes) -> list[bytes]:
        """The store's names of what else a prompt's last page has beside it."""
        return []

    def continuable(self, keys: list[bytes]) -> int:
        """By definition: all pages of the first group, those of the last window, and the rest."""
        count = next((n for n, key in enumerate(keys) if key not in self.held), len(keys))
        whole = [self.held.keys() >= set(self.blocks_of(key)) for key in keys]
        return max(
            end
            for end in range(count + 1)
            if not end or self.held.keys() >= set(self.before_windows(keys[end - 1]))
            if all(whole[max(0, end * self._page - self._window + 1) // self._page : end])
        )

    def _take_owner(self, outbox: Outbox) -> None:
        for put in () if self.is_silent else outbox.store_puts:
            self.held |= dict(zip(put.keys, put.data, strict=False))
            result = StorePutResult(put=put.put, is_answered=True, stored_pages=len(put.data))
            result.wants_data = not put.data
            self.send(store_put_results=[result])
        for lookup in outbox.store_lookups:
            self.send(store_answers=[self._answer(lookup)])
        for command in outbox.fill_commands:
            if command.action == "start":
                assert command.handle is not None
                for event in self._events(command.handle):
                    self.send(filler_events=[FillerEvent(lease_id=command.lease_id, event=event)])
        outbox.fill_commands.clear()
        super()._take_owner(outbox)

    def _answer(self, lookup: StoreLookup) -> StoreAnswer:
        assert lookup.block_pages == len(self.blocks_of(b""))
        assert lookup.state_pages == len(self.before_windows(b""))
        assert lookup.window_pages == -(-(self._window - 1) // self._page)
        found = self.continuable(lookup.keys)
        segment = StoreSegment(num_pages=found, store_id="s", address="s", epoch=_EPOCH)
        return StoreAnswer(
            lookup=lookup.lookup, segments=[segment] if found else [], epochs={"s": _EPOCH}
        )

    def _events(self, handle: KvHandle) -> Iterator[FillEvent]:
        size = self._page
        keys = PageKeys(handle.namespace, size).upto(handle.tokens, handle.end_token // size)
        of_windows = [name for key in reversed(keys) for name in self.blocks_of(key)]
        names = [*keys[handle.start_token // size :], *self.before_windows(keys[-1]), *of_windows]
        names = names[: len(handle.pages)]
        accepted = {"filler_epoch": _EPOCH, "end_token": handle.end_token, "transport": "data"}
        yield FillEvent(kind="accepted", **accepted)
        pages = [np.frombuffer(self.held[name], np.uint8) for name in names]
        for number, page in enumerate(pages):
            start = handle.start_token + number * size
            if number == self.most_sent:
                yield FillEvent(kind="failed", message="as told", is_stopped=True)
                return
            for at in range(0, len(page), DATA_CHUNK_BYTES):
                data = page[at : at + DATA_CHUNK_BYTES].tobytes()
                yield FillEvent(kind="data", chunk=number, start_token=start, offset=at, data=data)
            yield FillEvent(
                kind="written",
                chunk=number,
                start_token=start,
                end_token=start + size,
                digests=digest_pages(page[None], [0]).tolist(),
            )
        yield FillEvent(kind="done", timings=FillTimings())
