"""The process that compiles grammars: `python -m weft.engine.constraints.compiler FD`.

A constraint is a program of a stranger: compiling it may take any time, any memory, or the process
down. So each is compiled in a forked child of its own with bounds on both, and an engine never is.
The process has one thread and ends when its socket does.
"""

from __future__ import annotations

import math
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weft.engine.constraints.light_import import import_xgrammar_lightly
from weft.engine.constraints.wire import (
    WALL_FACTOR,
    CompileOrder,
    CompilerConfig,
    CompileResult,
    PeerClosed,
    VocabularyMessage,
    decode,
    encode,
    receive,
)
from weft.engine.request import Constraint

LOADING_NICE = 5
_READ_BYTES = 1 << 20
_OUT_OF_MEMORY = "std::bad_alloc"
"""In the message of the RuntimeError that a compiler without memory raises."""

Compile = Callable[[Constraint], str]
"""Compiles and serialises; raises ValueError or RuntimeError with the constraint's problem."""


class _Child:
    """A child process that compiles one order."""

    def __init__(self, number: int, pid: int, pipe: int, deadline: float) -> None:
        self.number = number
        self.pid = pid
        self.pipe = pipe
        self.deadline = deadline
        self.received = bytearray()
        self.is_late = False


class CompilerProcess:
    """Runs orders from a socket, each in a child process.

    Args:
        sock: To the engine.
        config: Bounds of each order.
        compile_one: What children do.
    """

    def __init__(self, sock: socket.socket, config: CompilerConfig, compile_one: Compile) -> None:
        self._sock = sock
        self._config = config
        self._compile = compile_one
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def run(self) -> None:
        """Works until the engine closes its end."""
        try:
            while True:
                for key, _ in self._selector.select(self._seconds_left()):
                    if key.fileobj is self._sock:
                        self._start(receive(self._sock, CompileOrder))
                    else:
                        self._read(self._children[key.fd])
                self._kill_late()
        except (PeerClosed, BrokenPipeError):
            for child in self._children.values():
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)

    def _seconds_left(self) -> float | None:
        deadlines = [child.deadline for child in self._children.values() if not child.is_late]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _start(self, order: CompileOrder) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._sock.close()
            _answer(order, writing, self._config, self._compile)
        os.close(writing)
        deadline = time.monotonic() + WALL_FACTOR * self._config.timeout_s
        self._children[reading] = _Child(order.number, pid, reading, deadline)
        self._selector.register(reading, selectors.EVENT_READ)

    def _read(self, child: _Child) -> None:
        data = os.read(child.pipe, _READ_BYTES)
        child.received += data
        if data:
            return
        self._selector.unregister(child.pipe)
        os.close(child.pipe)
        del self._children[child.pipe]
        _, status = os.waitpid(child.pid, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
            child.is_late = True
        result = decode(bytes(child.received), CompileResult)
        if result is None:
            seconds, size = self._config.timeout_s, self._config.max_memory_bytes >> 20
            reason = f"longer than {seconds:g} s" if child.is_late else f"more than {size} MiB"
            problem = f"is too large or too deep: compiling it takes {reason}"
            result = CompileResult(number=child.number, problem=problem)
        self._sock.sendall(encode(result))

    def _kill_late(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            if not child.is_late and now >= child.deadline:
                child.is_late = True
                os.kill(child.pid, signal.SIGKILL)


def _answer(order: CompileOrder, pipe: int, config: CompilerConfig, compile_one: Compile) -> None:
    """Compiles one order and sends the result; the body of a child process, which never returns."""
    try:
        limit = _address_space() + config.max_memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        seconds = math.ceil(config.timeout_s)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
        try:
            result = CompileResult(number=order.number, grammar=compile_one(order.constraint))
        except (ValueError, RuntimeError) as error:
            if _OUT_OF_MEMORY in str(error):
                raise MemoryError from error
            result = CompileResult(number=order.number, problem=str(error))
        except MemoryError:
            raise
        except Exception as error:
            problem = f"cannot be compiled: {type(error).__name__}: {error}"
            result = CompileResult(number=order.number, problem=problem)
        with open(pipe, "wb", closefd=True) as out:
            out.write(encode(result))
        os._exit(0)
    finally:
        # Out of memory, most likely: no answer is one too.
        os._exit(1)


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def main(descriptor: int) -> None:
    """Serves the engine at the other end of a socket."""
    sock = socket.socket(fileno=descriptor)
    try:
        config = receive(sock, CompilerConfig)
    except PeerClosed:
        return
    # Perhaps for nobody yet. Before the first fork: no child needs to do it again.
    loading = threading.Thread(target=_import_after_others)
    loading.start()
    loading.join()  # a process that forks must have no other thread
    from weft.engine.constraints.grammar import GrammarSource

    try:
        vocabulary = receive(sock, VocabularyMessage)
    except PeerClosed:
        return
    source = GrammarSource.of_text(vocabulary.text, config.max_grammar_bytes)
    CompilerProcess(sock, config, source.compile).run()


def _import_after_others() -> None:
    """Imports the compiler at low priority, which applies to the calling thread only."""
    if sys.platform == "linux":  # elsewhere a priority is a whole process's
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOADING_NICE)
    import_xgrammar_lightly()


if __name__ == "__main__":
    main(int(sys.argv[1]))
