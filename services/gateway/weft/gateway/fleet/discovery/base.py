"""The interface of worker discovery, and its simplest form."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and role of one worker."""

    role: Role
    address: str
    """Address, host:port."""
    node: str = ""
    """Machine that it runs on; empty: identified by the address's host."""


class Discovery(Protocol):
    """A source of endpoints.

    It says where workers may be; the gateway itself finds out whether they are healthy. So while a
    source fails, everything stays as it was.
    """

    def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        """Yields the complete list once it is known and after every change; never ends."""
        ...


class StaticDiscovery:
    """A fixed list of workers, each of which may come and go."""

    def __init__(self, decode: Iterable[str], prefill: Iterable[str]) -> None:
        self._endpoints = (
            *(Endpoint("decode", address) for address in decode),
            *(Endpoint("prefill", address) for address in prefill),
        )

    async def watch(self) -> AsyncIterator[tuple[Endpoint, ...]]:
        yield self._endpoints
        await asyncio.Event().wait()
