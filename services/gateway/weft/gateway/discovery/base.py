"""What a source of workers is, and the simplest one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address of one worker, and what it is for."""

    role: Role
    address: str
    """host:port"""
    node: str = ""
    """Machine that it runs on; empty = the address's host stands for it."""


class Discovery(Protocol):
    """A source of endpoints.

    It tells where workers may be, not whether they are well: that the gateway finds out by itself.
    So a source that cannot be asked for a while leaves everything as it was.
    """

    def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        """Yields the complete list as soon as it is known and after every change; never ends."""
        ...


class StaticDiscovery:
    """A list that never changes. Workers on it may come, go and come back."""

    def __init__(self, decode: Iterable[str], prefill: Iterable[str]) -> None:
        self._endpoints = (
            *(Endpoint("decode", address) for address in decode),
            *(Endpoint("prefill", address) for address in prefill),
        )

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        """See `Discovery.watch`."""
        yield self._endpoints
        await asyncio.Event().wait()
