"""Which worker holds which pages: one dictionary from page key to a set of workers, as bits.

A decision walks the prompt's pages once for all workers together. At each page the workers that
hold everything so far are one integer, a bit a worker, so the walk costs the same for 4 workers and
for 512. Keys are chained (`weft.contract.keys`), so a key stands for the whole prefix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from weft.gateway.routing.view import Column, PoolView, Rates, RoutingRequest, WorkerView

_BLOCK_PAGES = 16
"""Pages of a prompt looked up at a time."""
_INFLOW_WINDOW = 1 / 3
"""Window of the inflow, in new pages of all caches: a page that many pages old counts 1/e."""


class _Group:
    """Workers of a view whose pages have the same keys."""

    def __init__(self, view: PoolView, index: FleetPageIndex, positions: Sequence[int]) -> None:
        self.member = view.workers[positions[0]]
        self.mask = 0
        self.position_of_bit: dict[int, int] = {}
        numbers: list[int] = []
        for position in positions:
            number = index.number(view.workers[position])
            if number is not None:
                self.mask |= 1 << number
                self.position_of_bit[1 << number] = position
                numbers.append(number)
        self.known = np.array(list(self.position_of_bit.values()), np.int64)
        self.numbers = np.array(numbers, np.int64)
        self._num_bytes = max(numbers, default=0) // 8 + 1

    def positions(self, mask: int) -> NDArray[np.int64] | int:
        single = self.position_of_bit.get(mask)
        if single is not None:
            return single
        packed = np.frombuffer(mask.to_bytes(self._num_bytes, "little"), np.uint8)
        bits = np.unpackbits(packed, bitorder="little")
        found: NDArray[np.int64] = self.known[bits[self.numbers] != 0]
        return found


class FleetPageIndex:
    """Pages of all workers of a pool. At most `max_pages` over all workers are remembered; those
    beyond are counted.
    """

    def __init__(self, max_pages: int) -> None:
        self._max_pages = max_pages
        self._holders: dict[int, int] = {}
        self._held: dict[str, tuple[int, int, set[int]]] = {}
        """Epoch, number and keys by worker."""
        self._free_numbers: list[int] = []
        self._sizes: Column = np.zeros(64, np.int64)
        """Number of pages by number of the worker."""
        self._inflow: Rates = np.zeros(64)
        """Recent inflow of new pages by number of the worker."""
        self._num_unaged = 0
        """New pages over all workers since `inflow` was last read."""
        self._version = 0
        self._groups: tuple[PoolView | None, int, list[_Group]] = (None, 0, [])
        self.num_pages = 0
        """Pages remembered, over all workers."""
        self.num_dropped = 0
        """Pages left out because of the limit, since the start."""

    @property
    def num_keys(self) -> int:
        """Number of distinct pages."""
        return len(self._holders)

    def sizes(self, view: PoolView) -> Column:
        """Pages remembered of each worker, by position in the view."""
        found: Column = np.zeros(len(view), np.int64)
        for group in self._groups_of(view):
            found[group.known] = self._sizes[group.numbers]
        return found

    def inflow(self, view: PoolView) -> Rates:
        """Share of its cache that each worker has recently filled with new pages.

        "Recently" is the time in which all workers together have filled a third of their caches. So
        the value does not depend on the rate, and is a third for each worker if they fill evenly.
        """
        window = _INFLOW_WINDOW * float(view.total_pages.sum())
        found: Rates = np.zeros(len(view))
        if not window:
            return found
        if self._num_unaged:
            self._inflow *= math.exp(-self._num_unaged / window)
            self._num_unaged = 0
        for group in self._groups_of(view):
            found[group.known] = self._inflow[group.numbers]
        return found / np.maximum(view.total_pages, 1)

    def number(self, worker: WorkerView) -> int | None:
        """Bit of this incarnation; None: the index does not know it."""
        held = self._held.get(worker.worker_id)
        return held[1] if held is not None and held[0] == worker.epoch else None

    def replace(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        """Applies a snapshot: the worker holds exactly these pages."""
        self.forget(worker_id)
        self._add(worker_id, epoch, keys)

    def add(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        """Adds pages to an incarnation, and forgets those of the worker's other incarnation."""
        number, count = self._add(worker_id, epoch, keys)
        self._inflow[number] += count
        self._num_unaged += count

    def _add(self, worker_id: str, epoch: int, keys: Iterable[int]) -> tuple[int, int]:
        """Returns the worker's number, and the number of pages that were new."""
        held = self._held.get(worker_id)
        if held is None or held[0] != epoch:
            self.forget(worker_id)
            number = self._free_numbers.pop() if self._free_numbers else len(self._held)
            held = self._held[worker_id] = (epoch, number, set())
            self._version += 1
            if number >= len(self._sizes):
                self._sizes = np.concatenate([self._sizes, np.zeros_like(self._sizes)])
                self._inflow = np.concatenate([self._inflow, np.zeros_like(self._inflow)])
        _, number, known = held
        bit, holders, room = 1 << number, self._holders, self._max_pages - self.num_pages
        before = len(known)
        for key in keys:
            if key in known:
                continue
            if not room:
                self.num_dropped += 1
                continue
            room -= 1
            known.add(key)
            others = holders.get(key)
            holders[key] = bit if others is None else others | bit
        self.num_pages += len(known) - before
        self._sizes[number] = len(known)
        return number, len(known) - before

    def remove(self, worker_id: str, epoch: int, keys: Iterable[int]) -> None:
        """Removes pages of an incarnation."""
        held = self._held.get(worker_id)
        if held is None or held[0] != epoch:
            return
        _, number, known = held
        before = len(known)
        for key in keys:
            if key in known:
                known.remove(key)
                self._clear(key, 1 << number)
        self.num_pages -= before - len(known)
        self._sizes[number] = len(known)

    def forget(self, worker_id: str) -> int:
        """Forgets a worker; returns the number of its pages."""
        held = self._held.pop(worker_id, None)
        if held is None:
            return 0
        _, number, known = held
        for key in known:
            self._clear(key, 1 << number)
        self._free_numbers.append(number)
        self._sizes[number] = 0
        self._inflow[number] = 0
        self._version += 1
        self.num_pages -= len(known)
        return len(known)

    def clear(self) -> int:
        """Forgets everything; returns the number of pages."""
        count, self.num_pages = self.num_pages, 0
        self._holders.clear()
        self._held.clear()
        self._free_numbers.clear()
        self._sizes[:] = 0
        self._inflow[:] = 0
        self._version += 1
        return count

    def matches(self, view: PoolView, request: RoutingRequest) -> Column:
        """Leading prompt tokens that each worker holds, by position in the view.

        Only tokens that others may fill count: whole pages, never the last token, and none of a
        prompt that is computed anew. A worker that has lost a page inside a prefix may seem to hold
        more than it does; the worker itself decides.
        """
        found: Column = np.zeros(len(view), np.int64)
        if not self.num_pages or request.is_computed_anew:
            return found
        for group in self._groups_of(view):
            size = group.member.page_size
            if not group.mask or not size:
                continue
            for num_pages, mask in self._levels(group, request, size):
                found[group.positions(mask)] = num_pages * size
        return found

    def _levels(
        self, group: _Group, request: RoutingRequest, page_size: int
    ) -> list[tuple[int, int]]:
        """Pairs (pages, workers that hold at least this many), fewest pages first."""
        keys, num_pages = request.page_keys(group.member), request.num_useful_pages(page_size)
        get, held, start = self._holders.get, group.mask, 0
        levels: list[tuple[int, int]] = []
        # Usually the first page is not known.
        if num_pages and not (get(keys.upto(1)[0], 0) & held):
            return levels
        while held and start < num_pages:
            end = min(start + _BLOCK_PAGES, num_pages)
            known = keys.upto(end)
            # A worker loses the last pages of a path first, so the last page speaks for the block.
            if get(known[end - 1], 0) & held != held:
                for index in range(start, end):
                    still = get(known[index], 0) & held
                    if still != held:
                        if index:
                            levels.append((index, held))
                        held = still
                        if not held:
                            break
            start = end
        if held and num_pages:
            levels.append((num_pages, held))
        return levels

    def _groups_of(self, view: PoolView) -> list[_Group]:
        known, version, groups = self._groups
        if known is not view or version != self._version:
            by_naming: dict[tuple[bytes, str, int], list[int]] = {}
            for position, worker in enumerate(view.workers):
                by_naming.setdefault(worker.naming, []).append(position)
            groups = [_Group(view, self, positions) for positions in by_naming.values()]
            self._groups = (view, self._version, groups)
        return groups

    def _clear(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
