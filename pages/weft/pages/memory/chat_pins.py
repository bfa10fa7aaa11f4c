"""Pins of chat sessions: pages that a session's requests left in the prefix cache are evicted last.

The client names a session. When one of its requests has ended, the request's pages are pinned. They
stay pinned until the session has been idle for a while, is released, or too many pages are pinned:
then the session that has been idle for longest loses its pins. A pin only changes the order of
eviction. Requests that need pinned pages get them: first those of the session that has been idle
for longest, from its last page on.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from weft.pages.memory.tree import Node, PrefixTree

MAX_SESSIONS = 1 << 16


class SessionKey(NamedTuple):
    """A session in one namespace. Sessions of tenants with different salts are distinct."""

    cache_salt: str
    session_id: str
    namespace: bytes = b""


@dataclass(slots=True)
class SessionCounters:
    """Counters since start, part of the worker's counters."""

    expired_sessions: int = 0
    released_sessions: int = 0
    displaced_sessions: int = 0
    """Sessions that lost their pins to others because of the quota."""


class _Session(NamedTuple):
    leaf: Node
    num_pages: int
    tenant: str
    expires_at: float


class SessionPins:
    """The pinned sessions of one prefix cache. For use by one thread.

    Args:
        max_pages: Most pinned pages; a page of several sessions counts once.
        max_tenant_pages: Most pinned pages of one tenant; a page counts once per session.
        ttl_s: Seconds without an ended request after which a session loses its pins.
    """

    def __init__(
        self, cache: PrefixTree, max_pages: int, max_tenant_pages: int, ttl_s: float
    ) -> None:
        self._cache = cache
        self._max_pages = max_pages
        self._max_tenant_pages = max_tenant_pages
        self._ttl_s = ttl_s
        self._sessions: OrderedDict[SessionKey, _Session] = OrderedDict()
        """Sessions, longest idle first."""
        self._of_tenant: dict[str, OrderedDict[SessionKey, None]] = {}
        self._namespaces: dict[tuple[str, str], set[bytes]] = {}
        """The namespaces in which each session, named by salt and id, has pins."""
        self._num_pages_of: Counter[str] = Counter()
        self._num_stamps = 0
        self.counters = SessionCounters()

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def num_pages(self) -> int:
        return self._cache.num_pinned_pages

    def pin(self, key: SessionKey, tenant: str, leaf: Node, now: float) -> None:
        """Pins the pages of a session's finished request in place of the session's earlier ones.

        If the request has more pages than may be pinned, only the first ones are pinned. `leaf` is
        the cached node at which its pages end; `now` is in monotonic seconds.
        """
        most = min(self._max_pages, self._max_tenant_pages)
        num_pages = _depth(leaf)
        while num_pages > most:
            assert leaf.parent is not None
            leaf, num_pages = leaf.parent, num_pages - 1
        if num_pages:
            self._num_stamps += 1
            # The new pin begins before the old one ends, so that common pages stay pinned.
            self._cache.pin(leaf, self._num_stamps)
        self._end(key)
        if not num_pages:
            return
        self._sessions[key] = _Session(leaf, num_pages, tenant, now + self._ttl_s)
        self._of_tenant.setdefault(tenant, OrderedDict())[key] = None
        self._namespaces.setdefault(key[:2], set()).add(key.namespace)
        self._num_pages_of[tenant] += num_pages
        while self._num_pages_of[tenant] > self._max_tenant_pages:
            self._displace(next(iter(self._of_tenant[tenant])))
        while self._cache.num_pinned_pages > self._max_pages or len(self) > MAX_SESSIONS:
            self._displace(next(iter(self._sessions)))

    def release(self, cache_salt: str, session_id: str) -> bool:
        """Ends a session, in all namespaces; False: it has no pins."""
        namespaces = list(self._namespaces.get((cache_salt, session_id), ()))
        for namespace in namespaces:
            self._end(SessionKey(cache_salt, session_id, namespace))
        self.counters.released_sessions += bool(namespaces)
        return bool(namespaces)

    def expire(self, now: float) -> None:
        """Ends the sessions that have been idle for too long."""
        while self._sessions:
            key, session = next(iter(self._sessions.items()))
            if now < session.expires_at:
                return
            self._end(key)
            self.counters.expired_sessions += 1

    def clear(self) -> None:
        for key in list(self._sessions):
            self._end(key)

    def _displace(self, key: SessionKey) -> None:
        self._end(key)
        self.counters.displaced_sessions += 1

    def _end(self, key: SessionKey) -> None:
        session = self._sessions.pop(key, None)
        if session is None:
            return
        self._cache.unpin(session.leaf)
        tenant = session.tenant
        self._num_pages_of[tenant] -= session.num_pages
        del self._of_tenant[tenant][key]
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant], self._num_pages_of[tenant]
        namespaces = self._namespaces[key[:2]]
        namespaces.remove(key.namespace)
        if not namespaces:
            del self._namespaces[key[:2]]


def _depth(leaf: Node) -> int:
    depth, node = 0, leaf
    while node.parent is not None:
        depth, node = depth + 1, node.parent
    return depth
