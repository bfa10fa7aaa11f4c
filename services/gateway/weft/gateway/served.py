"""The models of one gateway, each with all that is its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from weft.common.adapters.manifest import Entry
from weft.engine.errors import ModelNotFound
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.fleet import ModelFleet
from weft.gateway.model import ServedModel
from weft.gateway.prepare import Preparer
from weft.gateway.request import Adapter
from weft.gateway.route import Router
from weft.gateway.slo.turnstile import Turnstile
from weft.gateway.validate import invalid

_SHOWN_CHARS = 100
_SHOWN_NAMES = 50
_REFRESH_S = 2.0
"""For the disk with the registry; then its last word counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One model: its texts, its workers, its policies and its gate."""

    model: ServedModel
    fleet: ModelFleet
    preparer: Preparer
    router: Router
    turnstile: Turnstile
    """Where requests are held or refused for the sake of latency targets."""

    @property
    def context_tokens(self) -> int:
        """The context length that every owner known has."""
        return self.fleet.max_context_tokens(self.model.max_context_tokens)

    def problem(self) -> str:
        """Why it cannot be served now; empty when it can."""
        missing = self.fleet.missing_roles()
        return f"no healthy {' and no healthy '.join(missing)} worker" if missing else ""

    def adapter_problem(self, adapter: Adapter) -> str:
        """Likewise, of one of its adapters."""
        if problem := self.problem():
            return problem
        return "" if self.router.has_holder(adapter.digest) else "no healthy worker holds it yet"


class Meant(NamedTuple):
    """What a client means by a name."""

    served: Served
    entry: Entry | None = None
    """Of the registry; None = the base model itself."""

    @property
    def name(self) -> str:
        """Of the adapter or else of the model."""
        return self.served.model.name if self.entry is None else self.entry.name

    @property
    def adapter(self) -> Adapter | None:
        """The adapter; None = the base model itself."""
        return None if self.entry is None else Adapter(self.entry.name, self.entry.digest_bytes)


class Catalogue:
    """The models and their adapters by name.

    Args:
        served: At least one; the first is that of `weft chat` and of dumps' first lines.
        adapters: What the registry says.
    """

    def __init__(self, served: Sequence[Served], adapters: AdapterDirectory | None = None) -> None:
        self._served = {one.model.name: one for one in served}
        self.adapters = adapters or AdapterDirectory(None)
        """What names of adapters mean."""

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def __len__(self) -> int:
        return len(self._served)

    @property
    def first(self) -> Served:
        """The one that was named first."""
        return next(iter(self._served.values()))

    async def find(self, name: str) -> Meant:
        """What a request is for. Nothing else runs between the answer and the caller.

        Args:
            name: As the client gave it: a model, an adapter or `model:adapter`; empty = the only
                model.

        Raises:
            ModelNotFound: There is no such model or adapter.
            InvalidRequest: None is named, and there are several.
        """
        if name:
            return await self.named(name)
        if len(self) > 1:
            raise invalid("model", f"is missing; this server has {self._names()}")
        return Meant(self.first)

    async def named(self, name: str) -> Meant:
        """Likewise, of a name that must be given.

        Raises:
            ModelNotFound: There is no such model or adapter.
        """
        meant = self._known(name)
        if meant is None:
            # Another gateway may have loaded it a moment ago.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_S):
                    await self.adapters.refresh()
            meant = self._known(name)
        return meant if meant is not None else self._refuse(name or "(none)")

    def base(self, name: str) -> Served:
        """A base model by its name.

        Args:
            name: Empty = the only one.

        Raises:
            ModelNotFound: There is no such base model.
            InvalidRequest: None is named, and there are several.
        """
        served = self._served.get(name)
        if served is not None:
            return served
        if name:
            self._refuse(name)
        if len(self) > 1:
            raise invalid("model", f"is missing; this server has {self._names()}")
        return self.first

    def adapters_of(self, served: Served) -> list[Meant]:
        """The adapters of a model that names mean now, by name."""
        entries = self.adapters.serving()
        return [Meant(served, entry) for entry in entries if entry.model == served.model.name]

    def _known(self, name: str) -> Meant | None:
        if (served := self._served.get(name)) is not None:
            return Meant(served)
        entry = self.adapters.find(name)
        if entry is not None and (served := self._served.get(entry.model)) is not None:
            return Meant(served, entry)
        for base, served in self._served.items():
            if name.startswith(f"{base}:"):
                entry = self.adapters.find(name[len(base) + 1 :])
                if entry is not None and entry.model == base:
                    return Meant(served, entry)
        return None

    def _refuse(self, name: str) -> NoReturn:
        shown = name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "..."
        raise ModelNotFound(
            f"the model `{shown}` does not exist; this server has {self._names()}",
            stage="validate",
            param="model",
        )

    def _names(self) -> str:
        adapters = [one.name for served in self for one in self.adapters_of(served)]
        names = [f"`{name}`" for name in [*self._served, *adapters]]
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        return ", ".join(names[:_SHOWN_NAMES]) + more
