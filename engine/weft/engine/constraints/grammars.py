"""Compiled grammars of one engine."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.engine.constraints.client import Compiled, CompilerClient
from weft.engine.constraints.wire import CompilerConfig
from weft.engine.errors import Overloaded, WeftError
from weft.engine.request import Constraint

if TYPE_CHECKING:
    import xgrammar

MAX_OPEN = 256
"""Most constraints being compiled or queued for it."""


class Grammars:
    """Compiled grammars by content; the least recently used are evicted when they need too many
    bytes.

    Used by the engine's thread.

    Args:
        config: Configuration of the compiler process, which is started when it is first needed.
        max_bytes: Most bytes of the cache.
        wake: Called from another thread when `take` has something.
    """

    def __init__(self, config: CompilerConfig, max_bytes: int, wake: Callable[[], None]) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._cached: OrderedDict[Constraint, xgrammar.CompiledGrammar] = OrderedDict()
        self._open: set[Constraint] = set()
        self._client: CompilerClient | None = None
        self._config = config
        self._wake = wake

    def find(self, constraint: Constraint) -> xgrammar.CompiledGrammar | None:
        """The grammar, if it is cached."""
        found = self._cached.get(constraint)
        if found is not None:
            self._cached.move_to_end(constraint)
        return found

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
        for constraint, outcome in taken:
            self._open.discard(constraint)
            if not isinstance(outcome, WeftError):
                self._keep(constraint, outcome)
        return taken

    def _keep(self, constraint: Constraint, grammar: xgrammar.CompiledGrammar) -> None:
        self._cached[constraint] = grammar
        self._num_bytes += grammar.memory_size_bytes
        while self._num_bytes > self._max_bytes and len(self._cached) > 1:
            _, oldest = self._cached.popitem(last=False)
            self._num_bytes -= oldest.memory_size_bytes

    @property
    def num_open(self) -> int:
        """Number of constraints being compiled."""
        return len(self._open)

    def close(self) -> None:
        """Stops the compiler process."""
        if self._client is not None:
            self._client.close()
