"""Residency of adapters on the device: which adapters have a place, their users, and eviction.

    away --place--> coming --arrived--> here --(no request and no step uses it)--> away
                                          |
                                          | others need its place
                                          v
                                        leaving: its users continue, no more are admitted

An adapter without users keeps its place until another adapter needs it; the least recently used
adapter is evicted first. When all have users, some adapters must leave for those that requests wait
for: they admit no more users, and their last user frees the place. An adapter that has just arrived
stays until a request has used it. Otherwise two adapters could displace each other from one place
without a token in between.

A step that has begun may name an adapter whose users have all ended. The adapter's rows and slot
become free only at the end of the newest step that had begun at that time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from weft.checkpoint.adapters.rows import DevicePlace, Needs
from weft.engine.features.lora.rows import RowPool

LEAVING_SHARE = 4
"""Largest share of the places that may be draining at a time; other places stay fully used."""


@dataclass(eq=False, slots=True, kw_only=True)
class Resident:
    digest: bytes
    place: DevicePlace
    is_here: bool = False
    """Whether the weights have arrived."""
    is_pinned: bool = False
    is_unused: bool = True
    """Whether no request was admitted with the adapter since its weights were loaded."""
    num_active: int = 0
    """Admitted requests that use the adapter."""
    last_step: int = 0
    """Number of the newest step that may use the adapter, once it has no users."""
    last_used: int = 0
    leaves_for: bytes = b""
    """Digest of the adapter that waits for this place; empty: this adapter is not draining."""


class Residency:
    def __init__(self, rows: RowPool) -> None:
        self._rows = rows
        self._residents: dict[bytes, Resident] = {}
        self._num_requests: dict[bytes, int] = {}
        self._newest_step = 0
        self._ended_step = 0
        self._num_uses = 0
        self._idle_step = 0
        """Number of the newest step that may still use an adapter without users."""
        self.is_changed = False
        """Whether an adapter may have come closer to a place since this was reset."""
        self.num_evictions = 0
        """Adapters evicted for others since start."""
        self.touched: set[bytes] = set()
        """Adapters that were loaded or evicted, or whose users changed. The reader clears it."""

    # -- for the scheduler (`AdapterResidency`) -------------------------------------------------

    def begin(self, digest: bytes) -> None:
        self._num_requests[digest] = self._num_requests.get(digest, 0) + 1
        self.touched.add(digest)

    def end(self, digest: bytes) -> None:
        self._num_requests[digest] -= 1
        self.touched.add(digest)
        if not self._num_requests[digest]:
            del self._num_requests[digest]
            self.is_changed = True

    def is_here(self, digest: bytes) -> bool:
        resident = self._residents.get(digest)
        return resident is not None and resident.is_here and not resident.leaves_for

    def enter(self, digest: bytes) -> int:
        resident = self._residents[digest]
        assert resident.is_here
        assert not resident.leaves_for
        resident.num_active += 1
        if resident.is_unused:
            resident.is_unused = False
            self.is_changed = True
        self._touch(resident)
        return resident.place.slot

    def leave(self, digest: bytes) -> None:
        resident = self._residents[digest]
        assert resident.num_active > 0, "an adapter was left twice"
        resident.num_active -= 1
        resident.last_step = self._newest_step
        if not resident.num_active:
            self._idle_step = self._newest_step
            self.is_changed = True
        self._touch(resident)

    def step_began(self, number: int) -> None:
        self._newest_step = number

    def step_ended(self, number: int) -> None:
        if self._ended_step < self._idle_step <= number:
            self.is_changed = True
        self._ended_step = number

    # -- queries ---------------------------------------------------------------------------------

    def has(self, digest: bytes) -> bool:
        """Whether the adapter has a place, even if its weights are still being copied."""
        return digest in self._residents

    def is_loaded(self, digest: bytes) -> bool:
        resident = self._residents.get(digest)
        return resident is not None and resident.is_here

    def num_requests(self, digest: bytes) -> int:
        """Requests that need the adapter, admitted or not."""
        return self._num_requests.get(digest, 0)

    def sizes(self) -> dict[str, int]:
        counts = self._residents.values()
        return {
            "adapters_with_requests": len(self._num_requests),
            "active_adapter_users": sum(resident.num_active for resident in counts),
        }

    def check_integrity(self) -> None:
        """Raises AssertionError unless each row and slot is free or belongs to one adapter."""
        residents = self._residents.values()
        num_slots = self._rows.num_free_slots + len({r.place.slot for r in residents})
        assert num_slots == self._rows.max_loras, "a slot is lost, or shared"
        for kind, total in self._rows.num_rows.items():
            rows = [r.place.rows[kind] for r in residents if kind in r.place.rows]
            taken = [row for some in rows for row in some.tolist()]
            assert len(set(taken)) == len(taken), f"a row of {kind} is shared"
            assert len(taken) + self._rows.num_free_rows(kind) == total, f"rows of {kind} are lost"

    # -- coming and going ------------------------------------------------------------------------

    def place(
        self, digest: bytes, needs: Needs, later: Collection[bytes] = (), *, is_pinned: bool
    ) -> DevicePlace | None:
        """Assigns a free place, or the place of an idle adapter; None: there is none now. The
        caller must write the adapter's weights there and then call `arrived`.

        Args:
            later: Adapters that also wait, with lower precedence.
            is_pinned: Whether the adapter keeps the place for good.
        """
        assert digest not in self._residents
        idle = self._enough(needs, self._idle(digest, later))
        if idle is None:
            return None
        for resident in idle:
            self._evict(resident)
        place = self._rows.allocate(needs)
        assert place is not None
        self.is_changed = True
        resident = Resident(digest=digest, place=place, is_pinned=is_pinned)
        self._residents[digest] = resident
        self._touch(resident)
        return place

    def place_if_free(self, digest: bytes, needs: Needs, *, is_pinned: bool) -> DevicePlace | None:
        """`place`, without evicting another adapter."""
        if self._rows.lacks(needs, {}, 0):
            return None
        return self.place(digest, needs, is_pinned=is_pinned)

    def arrived(self, digest: bytes) -> None:
        self._residents[digest].is_here = True
        self.touched.add(digest)

    def pin(self, digest: bytes, *, is_pinned: bool) -> None:
        if digest in self._residents:
            self._residents[digest].is_pinned = is_pinned

    def drop(self, digest: bytes) -> bool:
        """Removes an adapter from the device. False: it is in use or being written, and the caller
        must try again.
        """
        resident = self._residents.get(digest)
        if resident is None:
            return True
        if not resident.is_here or not self._is_idle(resident):
            return False
        self._free(resident)
        return True

    def make_leave(self, digest: bytes, needs: Needs, later: Collection[bytes] = ()) -> list[bytes]:
        """Starts draining adapters until there is a place for the adapter `digest`; returns the
        adapters that begin to leave.

        Args:
            later: Adapters that also wait, with lower precedence. An adapter that leaves for one of
                them may leave for `digest` instead.
        """
        leaving = [r for r in self._residents.values() if r.leaves_for]
        own = [r for r in leaving if r.leaves_for == digest or r.leaves_for in later]
        own.sort(key=lambda resident: resident.leaves_for != digest)
        if not own and len({r.leaves_for for r in leaving}) >= self._max_leaving:
            return []
        idle = [resident for resident in self._idle(digest, later) if resident not in own]
        busy = [
            resident
            for resident in self._residents.values()
            if resident.is_here
            and not (resident.is_pinned or resident.leaves_for or self._is_fresh(resident))
            and resident not in idle
        ]
        busy.sort(key=lambda resident: (resident.num_active, resident.last_used))
        chosen = self._enough(needs, [*own, *idle, *busy]) or []
        for resident in chosen:
            if resident not in idle:
                resident.leaves_for = digest
        return [resident.digest for resident in chosen if resident in busy]

    def stay(self, wanted: Iterable[bytes]) -> list[bytes]:
        """Stops the draining of adapters that leave for none of the wanted ones or are now pinned.
        Returns these adapters.
        """
        still = set(wanted)
        staying = [
            resident
            for resident in self._residents.values()
            if resident.leaves_for and (resident.is_pinned or resident.leaves_for not in still)
        ]
        for resident in staying:
            resident.leaves_for = b""
        return [resident.digest for resident in staying]

    @property
    def _max_leaving(self) -> int:
        return max(1, self._rows.max_loras // LEAVING_SHARE)

    def _touch(self, resident: Resident) -> None:
        self._num_uses += 1
        resident.last_used = self._num_uses

    def _is_idle(self, resident: Resident) -> bool:
        return resident.num_active == 0 and resident.last_step <= self._ended_step

    def _is_fresh(self, resident: Resident) -> bool:
        """Whether requests wait for the adapter and none was admitted since it was loaded."""
        return resident.is_unused and resident.digest in self._num_requests

    def _idle(self, wanted: bytes, later: Collection[bytes]) -> list[Resident]:
        """Adapters that may be evicted at once for the wanted one, best candidate first."""
        idle = [
            resident
            for resident in self._residents.values()
            if resident.is_here
            and not resident.is_pinned
            and self._is_idle(resident)
            and (resident.leaves_for or resident.digest not in self._num_requests)
            # The place of a leaving adapter is kept for the one it leaves for, unless that has less
            # precedence.
            and (resident.leaves_for in (b"", wanted) or resident.leaves_for in later)
        ]
        return sorted(idle, key=lambda resident: (not resident.leaves_for, resident.last_used))

    def _enough(self, needs: Needs, residents: Sequence[Resident]) -> list[Resident] | None:
        """The shortest prefix of `residents` whose eviction makes enough room; None: all of them
        together do not.
        """
        gained: dict[str, int] = {}
        for count, resident in enumerate(residents):
            if not self._rows.lacks(needs, gained, count):
                return list(residents[:count])
            for kind, rows in resident.place.rows.items():
                gained[kind] = gained.get(kind, 0) + len(rows)
        return None if self._rows.lacks(needs, gained, len(residents)) else list(residents)

    def _evict(self, resident: Resident) -> None:
        self.num_evictions += 1
        self._free(resident)

    def _free(self, resident: Resident) -> None:
        del self._residents[resident.digest]
        self.touched.add(resident.digest)
        self._rows.free(resident.place)
