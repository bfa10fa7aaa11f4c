"""Compiled constraints of one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.contract.errors import Overloaded
from weft.contract.request import Constraint
from weft.engine.features.constraints.compiling import Compiled, Compiler, VocabularyConfig

if TYPE_CHECKING:
    from weft.engine.features.constraints.unique import Matcher

MAX_OPEN = 256
"""Most constraints being compiled or queued for it."""


class Grammars:
    """Keeps the most recently used compiled constraints, by content. Used by the engine's thread.

    Args:
        config: The model's vocabulary, which is read when it is first needed.
        wake: Called from another thread when `take` has something.
    """

    def __init__(
        self,
        config: VocabularyConfig,
        timeout_s: float,
        max_kept: int,
        wake: Callable[[], None],
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._max_kept = max_kept
        self._wake = wake
        self._kept: OrderedDict[Constraint, Matcher] = OrderedDict()
        self._open: set[Constraint] = set()
        self._compiler: Compiler | None = None

    def find(self, constraint: Constraint) -> Matcher | None:
        """The constraint's matcher at the beginning of a text; None if it is not compiled."""
        found = self._kept.get(constraint)
        if found is not None:
            self._kept.move_to_end(constraint)
        return found

    def order(self, constraint: Constraint) -> None:
        """Queues a constraint for compilation; `take` returns the result. Raises Overloaded if too
        many are waiting.
        """
        if constraint in self._open:
            return
        if len(self._open) >= MAX_OPEN:
            message = f"{len(self._open)} constraints are being compiled"
            raise Overloaded(message, stage="compile", retry_after_s=1.0)
        self._open.add(constraint)
        self.start().order(constraint)

    def start(self) -> Compiler:
        if self._compiler is None:
            self._compiler = Compiler(self._config, self._timeout_s, self._wake)
        return self._compiler

    def take(self) -> list[Compiled]:
        """The constraints that were compiled, or failed to compile, since the last call."""
        if not self._open or self._compiler is None:
            return []
        taken = self._compiler.take()
        self._open.difference_update(constraint for constraint, _ in taken)
        return taken

    def keep(self, constraint: Constraint, matcher: Matcher) -> None:
        """Keeps a compiled constraint; drops the least recently used one if there are too many."""
        self._kept[constraint] = matcher
        while len(self._kept) > self._max_kept:
            self._kept.popitem(last=False)

    @property
    def num_open(self) -> int:
        return len(self._open)

    def close(self) -> None:
        if self._compiler is not None:
            self._compiler.close()
