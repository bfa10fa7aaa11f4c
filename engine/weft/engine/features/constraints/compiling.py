"""Compiles constraints in threads: a few at a time, each with a deadline.

llguidance compiles without Python's lock and within limits (`grammar.LIMITS`). The deadline covers
work without a limit: a thread that misses it is abandoned, and its requests fail.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.contract.errors import Internal, InvalidRequest, WeftError
from weft.contract.request import Constraint

if TYPE_CHECKING:
    from weft.engine.features.constraints.grammar import GrammarSource
    from weft.engine.features.constraints.unique import Matcher

logger = logging.getLogger(__name__)

TOO_SLOW = "the grammar is too ambiguous: following it takes too long"
"""Error message for a request whose constraint took too long."""
MAX_RUNNING = 2
"""Constraints that are compiled at a time."""
MAX_LOST = 4
"""Abandoned threads up to this number do not count as running; any more count until they end."""
STACK_BYTES = 512 << 20
"""Address space of a thread's stack, since llguidance recurses for each level of a grammar."""


class Compiled(NamedTuple):
    constraint: Constraint
    outcome: Matcher | WeftError


class VocabularyConfig(NamedTuple):
    """The model that constraints are compiled for."""

    model_dir: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Compiler:
    """Compiles constraints; reads the model's vocabulary at once.

    Args:
        timeout_s: Seconds that one constraint may take.
        wake: Called from a thread when `take` has something.
    """

    def __init__(
        self, config: VocabularyConfig, timeout_s: float, wake: Callable[[], None]
    ) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._wake = wake
        self._changed = threading.Condition()
        self._ordered: deque[Constraint] = deque()
        self._done: deque[Compiled] = deque()
        self._running: dict[Constraint, float] = {}
        """Deadlines of the constraints that are compiled now."""
        self._num_lost = 0
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def order(self, constraint: Constraint) -> None:
        with self._changed:
            self._ordered.append(constraint)
            self._changed.notify()

    def take(self) -> list[Compiled]:
        """Constraints that were compiled, or failed to compile, since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Ends the threads; a thread that is compiling ends when it has finished."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout=10.0)

    # -- threads -----------------------------------------------------------------------------------

    def _run(self) -> None:
        problem = ""
        source: GrammarSource | None = None
        try:
            source = self._source()
        except Exception as error:  # A broken tokenizer can raise anything.
            logger.exception("constraints cannot be compiled")
            problem = f"constraints cannot be compiled here: {type(error).__name__}: {error}"
        with self._changed:
            while not self._is_closing:
                if source is None:
                    failure = Internal(problem, stage="compile")
                    self._finish([Compiled(one, failure) for one in self._ordered])
                    self._ordered.clear()
                else:
                    self._give_up_late()
                    self._start(source)
                self._changed.wait(self._seconds_left())

    def _source(self) -> GrammarSource:
        # Imported here: engines without constraints need not have llguidance.
        from weft.engine.features.constraints.grammar import GrammarSource
        from weft.engine.features.constraints.vocabulary import load_vocabulary

        return GrammarSource(load_vocabulary(*self._config))

    def _seconds_left(self) -> float | None:
        if not self._running:
            return None
        return max(0.0, min(self._running.values()) - time.monotonic())

    def _start(self, source: GrammarSource) -> None:
        while (
            self._ordered and len(self._running) + max(0, self._num_lost - MAX_LOST) < MAX_RUNNING
        ):
            constraint = self._ordered.popleft()
            self._running[constraint] = time.monotonic() + self._timeout_s
            default = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(
                    target=self._compile, args=(source, constraint), name="grammar", daemon=True
                ).start()
            except RuntimeError as error:
                del self._running[constraint]
                failure = Internal(f"no thread compiles it: {error}; try again", stage="compile")
                self._finish([Compiled(constraint, failure)])
            finally:
                threading.stack_size(default)

    def _compile(self, source: GrammarSource, constraint: Constraint) -> None:
        outcome: Matcher | WeftError
        try:
            outcome = source.compile(constraint)
        except ValueError as error:
            outcome = InvalidRequest(str(error), stage="compile", param="constraint")
        except Exception as error:  # Each order gets an answer, whatever went wrong.
            logger.warning("a constraint failed to compile", exc_info=error)
            outcome = Internal(f"not compiled: {type(error).__name__}: {error}", stage="compile")
        with self._changed:
            if self._running.pop(constraint, None) is None:
                self._num_lost -= 1
            else:
                self._finish([Compiled(constraint, outcome)])
            self._changed.notify()

    def _give_up_late(self) -> None:
        now = time.monotonic()
        late = [one for one, deadline in self._running.items() if deadline <= now]
        for constraint in late:
            del self._running[constraint]
            self._num_lost += 1
            message = f"is too large or too deep: compiling it takes over {self._timeout_s:g} s"
            failure = InvalidRequest(message, stage="compile", param="constraint")
            self._finish([Compiled(constraint, failure)])

    def _finish(self, found: list[Compiled]) -> None:
        self._done += found
        if found:
            self._wake()
