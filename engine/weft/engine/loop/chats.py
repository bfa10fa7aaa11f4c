"""Chat sessions of an engine: pins the pages of their finished requests, within the quotas."""

from __future__ import annotations

from weft.contract.clock import Clock
from weft.engine.base.config import EngineConfig
from weft.engine.requests.request import Request
from weft.pages.memory.chat_pins import SessionKey, SessionPins
from weft.pages.memory.tree import PrefixTree


def make_sessions(
    config: EngineConfig, prefixes: PrefixTree | None, num_pages: int, clock: Clock
) -> Sessions | None:
    """Creates the session pins within the configured shares of the pool; None: disabled.

    Args:
        prefixes: None: nothing is cached.
    """
    max_pages = int(num_pages * config.session_pool_share)
    if prefixes is None or max_pages < 1:
        return None
    max_tenant_pages = max(1, int(max_pages * config.session_tenant_share))
    return Sessions(SessionPins(prefixes, max_pages, max_tenant_pages, config.session_ttl_s), clock)


class Sessions:
    """Pins the pages of requests that end. Used by the engine's thread."""

    def __init__(self, pins: SessionPins, clock: Clock) -> None:
        self.pins = pins
        self._clock = clock

    def on_leaving(self, request: Request) -> None:
        """Called when a session's request ends without an error, while it still has its pages."""
        if request.chat.is_last:
            self.release(request.cache_salt, request.chat.id)
        elif request.held.leaf is not None and request.held.leaf.page >= 0:
            key = SessionKey(request.cache_salt, request.chat.id, request.namespace)
            self.pins.pin(key, request.tenant, request.held.leaf, self._clock())

    def release(self, cache_salt: str, session_id: str) -> None:
        self.pins.release(cache_salt, session_id)

    def tick(self) -> None:
        self.pins.expire(self._clock())
