"""The engine's side of the compiler process: a thread that starts it, sends orders and reads
results.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.engine.constraints.wire import (
    WALL_FACTOR,
    CompileOrder,
    CompilerConfig,
    CompileResult,
    PeerClosed,
    VocabularyMessage,
    encode,
    receive,
)
from weft.engine.errors import Internal, InvalidRequest, WeftError
from weft.engine.request import Constraint

if TYPE_CHECKING:
    import xgrammar
    from weft.engine.constraints.grammar import GrammarSource

logger = logging.getLogger(__name__)

MAX_SENT = 2
"""Orders sent to the process at a time; it compiles them in parallel."""
START_S = 120.0
"""Seconds allowed for the process to start, beyond what an order may take."""
_SOCKET_BYTES = 1 << 20
"""Size of the socket buffers: all orders in flight fit, so that writing one never blocks."""


class Compiled(NamedTuple):
    """Outcome of compiling one constraint."""

    constraint: Constraint
    outcome: xgrammar.CompiledGrammar | WeftError


class CompilerClient:
    """Compiles constraints in a separate process, which is started at once.

    Args:
        config: Configuration of the process.
        wake: Called from the thread when `take` has something.
    """

    def __init__(self, config: CompilerConfig, wake: Callable[[], None]) -> None:
        self._config = config
        self._wake = wake
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._ordered: deque[Constraint] = deque()
        self._done: deque[Compiled] = deque()
        self._sent: dict[int, tuple[Constraint, float]] = {}
        """Orders in flight by number: the constraint, and the deadline for its answer."""
        self._next_number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._is_closing = False
        self._vocabulary: VocabularyMessage | None = None
        """The model's vocabulary, once it has been read."""
        self._thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        self._thread.start()

    def order(self, constraint: Constraint) -> None:
        """Queues a constraint for compilation."""
        self._ordered.append(constraint)
        os.eventfd_write(self._event, 1)

    def take(self) -> list[Compiled]:
        """Outcomes since the last call."""
        return [self._done.popleft() for _ in range(len(self._done))]

    def close(self) -> None:
        """Stops the thread and the process."""
        self._is_closing = True
        os.eventfd_write(self._event, 1)
        self._thread.join(timeout=10.0)
        os.close(self._event)

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._event, selectors.EVENT_READ)
            try:
                source = self._prepare(selector)
            except Exception as error:  # whatever a tokenizer can have wrong
                logger.exception("constraints cannot be compiled")
                self._refuse_all(selector, f"{type(error).__name__}: {error}")
                return
            while not self._is_closing:
                try:
                    self._send(selector)
                    for key, _ in selector.select(self._seconds_left()):
                        if key.fd == self._event:
                            os.eventfd_read(self._event)
                        elif self._sock is not None:
                            self._finish(receive(self._sock, CompileResult), source)
                    if self._seconds_left() == 0.0:
                        raise PeerClosed("it does not answer")
                except Exception as error:  # whatever it is, each order gets an answer
                    self._lose_process(selector, error)
            self._end_process(selector)

    def _prepare(self, selector: selectors.BaseSelector) -> GrammarSource:
        """Starts the process, and imports what is needed here meanwhile."""
        with contextlib.suppress(OSError):  # the first order tries again
            self._start_process(selector)
        # Imported here: it takes a second, which the engine's thread need not wait.
        from weft.engine.constraints.grammar import GrammarSource
        from weft.engine.constraints.vocabulary import load_vocabulary

        config = self._config
        vocabulary = load_vocabulary(
            Path(config.model_dir), config.vocab_size, config.eos_token_ids
        )
        self._vocabulary = VocabularyMessage(text=vocabulary.serialize_json())
        try:
            if self._sock is not None:
                self._sock.sendall(encode(self._vocabulary))
        except OSError:
            self._end_process(selector)
        return GrammarSource(vocabulary, config.max_grammar_bytes)

    def _refuse_all(self, selector: selectors.BaseSelector, why: str) -> None:
        """Fails every order, until it is closed."""
        self._end_process(selector)
        failure = Internal(f"constraints cannot be compiled here: {why}", stage="compile")
        while not self._is_closing:
            while self._ordered:
                self._done.append(Compiled(self._ordered.popleft(), failure))
            self._wake()
            selector.select()
            os.eventfd_read(self._event)

    def _seconds_left(self) -> float | None:
        if not self._sent:
            return None
        return max(0.0, min(until for _, until in self._sent.values()) - time.monotonic())

    def _send(self, selector: selectors.BaseSelector) -> None:
        while self._ordered and len(self._sent) < MAX_SENT:
            constraint = self._ordered.popleft()
            self._next_number += 1
            until = time.monotonic() + WALL_FACTOR * self._config.timeout_s + START_S
            self._sent[self._next_number] = constraint, until
            sock = self._sock or self._start_process(selector)
            sock.sendall(encode(CompileOrder(number=self._next_number, constraint=constraint)))

    def _finish(self, result: CompileResult, source: GrammarSource) -> None:
        constraint, _ = self._sent[result.number]
        outcome: xgrammar.CompiledGrammar | WeftError
        if result.problem:
            outcome = InvalidRequest(result.problem, stage="compile", param="constraint")
        else:
            outcome = source.read(result.grammar)
        del self._sent[result.number]
        self._done.append(Compiled(constraint, outcome))
        self._wake()

    def _start_process(self, selector: selectors.BaseSelector) -> socket.socket:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
        command = [sys.executable, "-m", "weft.engine.constraints.compiler", str(theirs.fileno())]
        # A process that forks must have no threads of its own.
        single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], env={**os.environ, **single}
                )
            except BaseException:
                ours.close()
                raise
        self._sock = ours
        selector.register(ours, selectors.EVENT_READ)
        ours.sendall(encode(self._config))
        if self._vocabulary is not None:
            ours.sendall(encode(self._vocabulary))
        return ours

    def _lose_process(self, selector: selectors.BaseSelector, error: Exception) -> None:
        """Fails the orders in flight; the next order starts a new process."""
        logger.warning("the grammar compiler is gone: %s: %s", type(error).__name__, error)
        self._end_process(selector)
        lost = Internal(
            "the grammar compiler cannot be started, or ended; try again", stage="compile"
        )
        lost.retryable = True
        self._done += [Compiled(constraint, lost) for constraint, _ in self._sent.values()]
        self._sent.clear()
        self._wake()

    def _end_process(self, selector: selectors.BaseSelector) -> None:
        if self._sock is not None:
            selector.unregister(self._sock)
            self._sock.close()
            self._sock = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
