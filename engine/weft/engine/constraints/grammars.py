"""Compiled grammars of one engine."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.engine.constraints.client import Compiled, CompilerClient
from weft.engine.constraints.wire import CompilerConfig
from weft.engine.errors import Overloaded
from weft.engine.request import Constraint

if TYPE_CHECKING:
    import xgrammar

MAX_OPEN = 256
"""Most constraints being compiled or queued for it."""


class Grammars:
    """Compiled grammars by content, as many as fit; those that are in use stay, of the others the
    least recently used leave first.

    Used by the engine's thread.

    Args:
        config: Configuration of the compiler process, which is started when it is first needed.
        max_bytes: Most bytes of all, those in use included.
        wake: Called from another thread when `take` has something.
    """

    def __init__(self, config: CompilerConfig, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: OrderedDict[Constraint, xgrammar.CompiledGrammar] = OrderedDict()
        self._num_users: Counter[Constraint] = Counter()
        self._open: set[Constraint] = set()
        self._client: CompilerClient | None = None
        self._config = config
        self._wake = wake

    def hold(self, constraint: Constraint) -> xgrammar.CompiledGrammar | None:
        """The grammar, if it is here, which `let_go` must follow; else None."""
        found = self._kept.get(constraint)
        if found is not None:
            self._kept.move_to_end(constraint)
            self._num_users[constraint] += 1
        return found

    def let_go(self, constraint: Constraint) -> None:
        """Ends one use of a grammar."""
        self._num_users[constraint] -= 1
        if not self._num_users[constraint]:
            del self._num_users[constraint]

    def order(self, constraint: Constraint) -> None:
        """Queues a constraint for compilation; `take` returns the result.

        Raises:
            Overloaded: Too many are waiting.
        """
        if constraint in self._open:
            return
        if len(self._open) >= MAX_OPEN:
            message = f"{len(self._open)} constraints are being compiled"
            raise Overloaded(message, stage="compile", retry_after_s=1.0)
        self._open.add(constraint)
        self.start().order(constraint)

    def start(self) -> CompilerClient:
        """Starts the process if it is not running; it is ready some seconds later."""
        if self._client is None:
            self._client = CompilerClient(self._config, self._wake)
        return self._client

    def take(self) -> list[Compiled]:
        """The constraints that were compiled, or failed to compile, since the last call."""
        if not self._open or self._client is None:
            return []
        taken = self._client.take()
        self._open.difference_update(constraint for constraint, _ in taken)
        return taken

    def keep(
        self, constraint: Constraint, grammar: xgrammar.CompiledGrammar, num_users: int
    ) -> None:
        """Keeps what was compiled, for so many users that hold it at once.

        Raises:
            Overloaded: Those in use leave no room for it.
        """
        size = grammar.memory_size_bytes
        for other in [one for one in self._kept if one not in self._num_users]:
            if self._num_bytes + size <= self._max_bytes:
                break
            self._num_bytes -= self._kept.pop(other).memory_size_bytes
        if self._num_bytes + size > self._max_bytes:
            message = f"the grammars of unfinished requests take {self._num_bytes:,} bytes"
            raise Overloaded(message, stage="compile", retry_after_s=1.0)
        self._kept[constraint] = grammar
        self._num_bytes += size
        if num_users:
            self._num_users[constraint] = num_users

    @property
    def num_open(self) -> int:
        """Number of constraints being compiled."""
        return len(self._open)

    def close(self) -> None:
        """Stops the compiler process."""
        if self._client is not None:
            self._client.close()
