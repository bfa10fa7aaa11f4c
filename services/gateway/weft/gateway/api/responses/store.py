"""Stores of responses that can be read and continued later, and the store in a gateway's memory."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

ENTRY_OVERHEAD_BYTES = 512
"""Assumed size of an entry, its texts apart."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response that has ended."""

    response: bytes
    """The response object, as JSON."""
    history: bytes
    """The messages of the whole conversation, its answer included, as a JSON list."""
    items: bytes = b"[]"
    """The items of the conversation without its answer, as a JSON list."""

    @property
    def num_bytes(self) -> int:
        """Memory that the entry is counted as."""
        return len(self.response) + len(self.history) + len(self.items) + ENTRY_OVERHEAD_BYTES


class ResponseStore(Protocol):
    """Keeps responses of tenants apart."""

    is_shared: bool
    """Whether other gateways, and this one after a restart, find the responses."""

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """Keeps a response, if there is room for it."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """Finds a response of a tenant; None: it is not kept, or is another tenant's. Raises
        PeerUnavailable if the store does not answer now.
        """
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response; False: there is none. Raises PeerUnavailable if the store does not
        answer now.
        """
        ...

    async def close(self) -> None:
        """Releases what the store holds."""
        ...


class MemoryResponses:
    """Implements `ResponseStore` in the memory of one gateway, and drops the least recently used.

    When room is needed, the tenant with the most bytes loses its least recently used response, so
    that one tenant cannot displace the others.
    """

    is_shared = False

    def __init__(self, max_bytes: int, max_responses: int) -> None:
        """`max_bytes` bounds all entries together; 0: nothing is kept."""
        self._max_bytes = max_bytes
        self._max_responses = max_responses
        self._entries: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes: dict[str, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def num_responses(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    async def put(self, tenant: str, response_id: str, stored: StoredResponse) -> None:
        """A response that is larger than the store is not kept."""
        self._forget(tenant, response_id)
        if stored.num_bytes > self._max_bytes:
            return
        self._entries.setdefault(tenant, OrderedDict())[response_id] = stored
        self._bytes[tenant] = self._bytes.get(tenant, 0) + stored.num_bytes
        while self.num_bytes > self._max_bytes or self.num_responses > self._max_responses:
            heaviest = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(heaviest, next(iter(self._entries[heaviest])))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        entries = self._entries.get(tenant, OrderedDict())
        if (found := entries.get(response_id)) is not None:
            entries.move_to_end(response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> bool:
        return self._forget(tenant, response_id)

    async def close(self) -> None: ...

    def _forget(self, tenant: str, response_id: str) -> bool:
        entries = self._entries.get(tenant, OrderedDict())
        found = entries.pop(response_id, None)
        if found is None:
            return False
        self._bytes[tenant] -= found.num_bytes
        if not entries:
            del self._entries[tenant], self._bytes[tenant]
        return True
