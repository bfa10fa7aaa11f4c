"""The models of one gateway, each with all that is its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from weft.engine.errors import ModelNotFound
from weft.gateway.fleet import ModelFleet
from weft.gateway.model import ServedModel
from weft.gateway.prepare import Preparer
from weft.gateway.route import Router
from weft.gateway.slo.turnstile import Turnstile
from weft.gateway.validate import invalid

_SHOWN_CHARS = 100


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


class Catalogue:
    """The models by name.

    Args:
        served: At least one; the first is that of `weft chat` and of dumps' first lines.
    """

    def __init__(self, served: Sequence[Served]) -> None:
        self._served = {one.model.name: one for one in served}

    def __iter__(self) -> Iterator[Served]:
        return iter(self._served.values())

    def __len__(self) -> int:
        return len(self._served)

    @property
    def first(self) -> Served:
        """The one that was named first."""
        return next(iter(self._served.values()))

    def find(self, name: str) -> Served:
        """The model of a request.

        Args:
            name: As the client gave it; empty = the only one.

        Raises:
            ModelNotFound: There is no such model.
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

    def named(self, name: str) -> Served:
        """Likewise, of a name that must be given.

        Raises:
            ModelNotFound: There is no such model.
        """
        served = self._served.get(name)
        return served if served is not None else self._refuse(name or "(none)")

    def _refuse(self, name: str) -> NoReturn:
        shown = name if len(name) <= _SHOWN_CHARS else name[:_SHOWN_CHARS] + "..."
        raise ModelNotFound(
            f"the model `{shown}` does not exist; this server has {self._names()}",
            stage="validate",
            param="model",
        )

    def _names(self) -> str:
        return ", ".join(f"`{name}`" for name in self._served)
