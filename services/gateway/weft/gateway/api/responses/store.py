"""Responses that can be read and continued later: in the memory of one gateway, bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

ENTRY_OVERHEAD_BYTES = 512
"""Assumed size of an entry beside its two texts."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response that has ended."""

    response: bytes
    """The response object, as JSON."""
    history: bytes
    """The messages of the whole conversation, its answer included, as a JSON list."""

    @property
    def num_bytes(self) -> int:
        """Memory that the entry is counted with."""
        return len(self.response) + len(self.history) + ENTRY_OVERHEAD_BYTES


class ResponseStore:
    """Keeps responses of tenants apart and forgets the least recently used ones.

    Where there is too much, the tenant with the most bytes loses its oldest response, so that one
    tenant cannot drive out the others.
    """

    def __init__(self, max_bytes: int, max_responses: int) -> None:
        """Creates an empty store.

        Args:
            max_bytes: Bound of all entries; 0 = nothing is kept.
            max_responses: Bound of their number.
        """
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of all entries."""
        return sum(self._bytes.values())

    @property
    def num_responses(self) -> int:
        """Number of entries."""
        return sum(len(entries) for entries in self._entries.values())

    def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response; one that is larger than the store is not kept."""
        self.delete(tenant, response_id)
        if stored.num_bytes > self._max_bytes:
            return
        self._entries.setdefault(tenant, OrderedDict())[response_id] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.num_bytes
        while self.num_bytes > self._max_bytes or self.num_responses > self._max_responses:
            heaviest = max(self._bytes, key=self._bytes.__getitem__)
            self.delete(heaviest, next(iter(self._entries[heaviest])))

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Finds a response of a tenant; None: it is not kept, or is another tenant's."""
        entries = self._entries.get(tenant, OrderedDict())
        if (found := entries.get(response_id)) is not None:
            entries.move_to_end(response_id)
        return found

    def peek(self, tenant: str, response_id: str) -> StoredResponse | None:
        """As `get`, from any thread: it counts as no use."""
        entries = self._entries.get(tenant)
        return None if entries is None else entries.get(response_id)

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; False: there is none."""
        entries = self._entries.get(tenant, OrderedDict())
        found = entries.pop(response_id, None)
        if found is None:
            return False
        self._bytes[tenant] -= found.num_bytes
        if not entries:
            del self._entries[tenant], self._bytes[tenant]
        return True
