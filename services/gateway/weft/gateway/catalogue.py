"""The models of one gateway, with everything that belongs to each."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from weft.common.adapters.manifest import Entry
from weft.contract.errors import DeadlineExceeded, ModelNotFound
from weft.contract.tasks import TASKS, Task
from weft.gateway.adapters.cards import AdapterCards
from weft.gateway.adapters.directory import AdapterDirectory
from weft.gateway.admission.slo.admission import LatencyAdmission
from weft.gateway.fleet.fleet import ModelFleet
from weft.gateway.request import ResolvedAdapter
from weft.gateway.routing.router import Router
from weft.gateway.telemetry.demand import ModelDemand
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.prepare import Preparer
from weft.gateway.validate import invalid

_SHOWN_CHARS = 100
_SHOWN_NAMES = 50
_REFRESH_S = 2.0
"""Seconds to wait for the registry's disk; then the last known state counts."""
_CARD_S = 30.0
"""Seconds to wait for an adapter's tokenizer, which its first request reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One served model: its card, its workers, its policies and its gate."""

    model: ModelCard
    fleet: ModelFleet
    preparer: Preparer
    router: Router
    latency_admission: LatencyAdmission
    """Holds back or refuses requests for the sake of latency targets."""
    demand: ModelDemand = field(default_factory=ModelDemand)

    @property
    def context_tokens(self) -> int:
        """Smallest context length of all known owners."""
        return self.fleet.max_context_tokens(self.model.max_context_tokens)

    @property
    def task(self) -> Task:
        """What its workers serve, as far as they have reported; else what its files are for."""
        told = self.fleet.task()
        return next((task for task in TASKS if task == told), self.model.pooling.task)

    def problem(self) -> str:
        """Why the model cannot be served now; empty if it can."""
        missing = self.fleet.missing_roles()
        return f"no healthy {' and no healthy '.join(missing)} worker" if missing else ""

    def adapter_problem(self, adapter: ResolvedAdapter) -> str:
        """Why one of its adapters cannot be served now; empty if it can."""
        if problem := self.problem():
            return problem
        return "" if self.router.has_holder(adapter.digest) else "no healthy worker holds it yet"


class ResolvedModel(NamedTuple):
    """What a client's model name refers to."""

    served: ServedModel
    entry: Entry | None = None
    """Entry of the registry; None: the base model itself."""

    @property
    def name(self) -> str:
        """Name of the adapter or else of the model."""
        return self.served.model.name if self.entry is None else self.entry.name

    @property
    def adapter(self) -> ResolvedAdapter | None:
        """None: the base model itself."""
        return (
            None
            if self.entry is None
            else ResolvedAdapter(self.entry.name, self.entry.digest_bytes)
        )


class Catalogue:
    """The models and their adapters by name. `served` has at least one model; `weft chat` uses the
    first one. `expected` names the adapters that `missing_adapters` is about.
    """

    def __init__(
        self,
        served: Sequence[ServedModel],
        adapters: AdapterDirectory,
        cards: AdapterCards,
        expected: Sequence[str] = (),
    ) -> None:
        self._served = {one.model.name: one for one in served}
        self.adapters = adapters
        """Directory of the adapters' names."""
        self._cards = cards
        self._missing = list(expected)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served.values())

    def __len__(self) -> int:
        return len(self._served)

    @property
    def first(self) -> ServedModel:
        """The model named first."""
        return next(iter(self._served.values()))

    async def find(self, name: str) -> ResolvedModel:
        """Resolves a request's model name, atomically with respect to the caller: a model, an
        adapter or `model:adapter`; empty: the only model. Raises ModelNotFound if there is no such
        model or adapter, InvalidRequest if the name is empty and there are several models.
        """
        return await self.named(name) if name else ResolvedModel(self.base(""))

    async def named(self, name: str) -> ResolvedModel:
        """Resolves a name that must not be empty. Raises ModelNotFound if there is no such model or
        adapter.
        """
        resolved = self._known(name)
        if resolved is None:
            # Another gateway may just have loaded the adapter.
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_S):
                    await self.adapters.refresh()
            resolved = self._known(name)
        return resolved if resolved is not None else self._refuse(name or "(none)")

    async def card(self, resolved: ResolvedModel, timeout_s: float = _CARD_S) -> ModelCard:
        """The tokenizer and chat template of a model, or of an adapter that brings its own. Waits
        at most `timeout_s` for a disk.

        Raises:
            PeerUnavailable: The adapter was unloaded meanwhile.
            AdapterError: The adapter's files have become unreadable.
            DeadlineExceeded: The registry's disk does not answer.
        """
        if resolved.entry is None:
            return resolved.served.model
        try:
            async with asyncio.timeout(timeout_s):
                return await self._cards.of(resolved.entry, resolved.served.model)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the tokenizer of the adapter `{resolved.name}` was not read in time",
                stage="prepare",
            ) from None

    def base(self, name: str) -> ServedModel:
        """Finds a base model by its name; empty: the only one. Raises ModelNotFound if there is
        none of the name, InvalidRequest if the name is empty and there are several models.
        """
        served = self._served.get(name)
        if served is not None:
            return served
        if name:
            self._refuse(name)
        if len(self) > 1:
            raise invalid("model", f"is missing; this server has {self._names()}")
        return self.first

    def adapters_of(self, served: ServedModel) -> list[ResolvedModel]:
        """The adapters of a model that names refer to now, by name."""
        entries = self.adapters.serving()
        return [
            ResolvedModel(served, entry) for entry in entries if entry.model == served.model.name
        ]

    def missing_adapters(self) -> list[str]:
        """The expected adapters that could not be served at any call so far."""
        self._missing = [name for name in self._missing if not self._can_serve(name)]
        return self._missing

    def _can_serve(self, name: str) -> bool:
        found = self._known(name)
        if found is None or found.adapter is None:
            return False
        return not found.served.adapter_problem(found.adapter)

    def _known(self, name: str) -> ResolvedModel | None:
        if (served := self._served.get(name)) is not None:
            return ResolvedModel(served)
        entry = self.adapters.find(name)
        if entry is not None and (served := self._served.get(entry.model)) is not None:
            return ResolvedModel(served, entry)
        for base, served in self._served.items():
            if name.startswith(f"{base}:"):
                entry = self.adapters.find(name[len(base) + 1 :])
                if entry is not None and entry.model == base:
                    return ResolvedModel(served, entry)
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
