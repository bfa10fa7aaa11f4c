"""The only module that imports NIXL: loads and configures it, and creates agents."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import logging
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weft.pages.transfer.nixl_wire import TransferError, TransportMismatch

logger = logging.getLogger(__name__)

PACKAGES = ("nixl", "nixl-cu13", "nixl-cu12")
"""Distributions that bring NIXL: the meta package, which needs one of the others, and these. NIXL
calls CUDA through the driver alone, so either of them works with any PyTorch.
"""

PROGRESS_DELAY_US = 50_000
"""Longest sleep of an agent's progress thread; events wake it at once. With 0, the wrapper's
choice, the thread spins and takes a core. Each time it wakes, it takes a core from a thread of a
step for which the step's other threads wait.
"""
DEVICE_PROGRESS_DELAY_US = 1000
"""The longest sleep if a device computes and the cores of this process are free."""

_LANE_LINE = re.compile(r"UCX\s+INFO\s+(\S+) (intra-node|inter-node) cfg#\d+ (.*)$")
_TRANSPORT = re.compile(r"[\w.]+/[\w.:]+")
_COMPLAINT_LINE = re.compile(r"UCX\s+(?:WARN|ERROR|FATAL)\s+(.*)$")
_WORKER_NAME_CHARS = 31
"""UCX cuts agent names to this length in its log."""


def nixl_version() -> str:
    """Version of the installed NIXL; empty: there is none."""
    return next((version for _, version in _installed()), "")


def _installed() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield package.replace("-", "_"), importlib.metadata.version(package)


def nixl_available() -> tuple[bool, str]:
    """Whether NIXL can be used in this process, and if not, why (one line)."""
    try:
        binding = load_binding()
    except TransportMismatch as error:
        return False, error.message
    return True, f"nixl {binding.version}"


@functools.cache
def load_binding() -> Binding:
    """Imports NIXL on first use.

    Raises:
        TransportMismatch: NIXL is not installed or does not load.
    """
    problem = f"none of the packages {', '.join(PACKAGES)} is installed"
    for module, version in _installed():
        try:
            return Binding(module, version)
        except (ImportError, OSError) as error:
            problem = f"{module} {version}: {error}"
            logger.debug("NIXL is not usable as %s", module, exc_info=True)
    raise TransportMismatch(f"NIXL is not usable here: {problem}")


def is_destroyed(agent: weakref.ref[Any]) -> bool:
    """Whether an agent's C++ object is gone, with its threads and connections."""
    if agent() is not None:
        gc.collect()  # Frees the agent if only a reference cycle holds it.
    return agent() is None


class Binding:
    """A package of NIXL as loaded in this process. Both ends of a transfer compare its version."""

    def __init__(self, module: str, version: str) -> None:
        self.version = version
        raise_exceptions = logging.raiseExceptions
        self._api: Any = importlib.import_module(f"{module}._api")
        bindings: Any = importlib.import_module(f"{module}._bindings")
        logging.raiseExceptions = raise_exceptions  # The import changes it for the whole process.
        _adopt_logger()
        named = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
        # pybind11 converts C++ exceptions that have no Python class to RuntimeError, ValueError
        # or TypeError.
        self.errors: tuple[type[Exception], ...] = (
            *(error for error in named if isinstance(error, type)),
            RuntimeError,
            ValueError,
            TypeError,
        )
        self._lock = threading.Lock()
        self._log = _LOG

    def create_agent(self, name: str, *, has_device: bool, has_thread: bool = True) -> Any:
        """A UCX agent whose progress thread sleeps.

        Args:
            name: Unique, without spaces.
            has_device: Whether a device of this process computes and copies.
            has_thread: Whether it has a progress thread. An agent without one makes progress only
                while its transfers are polled. While a post copies bytes, a thread that wakes spins
                for the lock on the agent that the post holds.
        """
        config = self._api.nixl_agent_config(
            enable_prog_thread=has_thread,
            sync_mode=self._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        delay_us = DEVICE_PROGRESS_DELAY_US if has_device else PROGRESS_DELAY_US
        with self._lock, self._log.capturing(), self._sleeping_progress_threads(delay_us):
            agent = self._api.nixl_agent(name, config)
        if "UCX" not in agent.backends:
            raise TransferError("NIXL has no UCX back end here")
        return agent

    @contextlib.contextmanager
    def calls(self, what: str) -> Iterator[None]:
        """Converts any exception that nixl raises inside to a TransferError that names the
        operation.
        """
        try:
            yield
        except self.errors as error:
            self._log.take()
            # The frames of the traceback refer to the agent and would keep it from being destroyed.
            cause = error.with_traceback(None)
            raise TransferError(f"{what}: {type(error).__name__} {error}") from cause

    def lanes(self, agent_name: str) -> str | None:
        """The lanes by which UCX moves this agent's bytes, as UCX logs them; None while unknown."""
        return self._log.lanes(agent_name[:_WORKER_NAME_CHARS])

    @contextlib.contextmanager
    def _sleeping_progress_threads(self, delay_us: int) -> Iterator[None]:
        """Makes the progress threads of agents created inside sleep: nixl_agent_config has no
        option for it.
        """
        module = self._api
        original = module.nixlBind
        module.nixlBind = _SleepingBind(original, delay_us)
        try:
            yield
        finally:
            module.nixlBind = original


class _SleepingBind:
    """Replaces nixl's extension module while an agent is created."""

    def __init__(self, original: Any, delay_us: int) -> None:
        self._original = original
        self._delay_us = delay_us

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def nixlAgent(self, name: str, config: Any) -> Any:
        config.pthrDelay = self._delay_us
        return self._original.nixlAgent(name, config)


class _UcxLog:
    """UCX's log, captured in memory, since UCX names the chosen lanes only there.

    UCX reads its log settings from the environment once in a process, when the first agent is
    created. So there is one log, whatever packages of NIXL are loaded. Settings of the user stay in
    force; the lanes are then unknown.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._is_decided = False
        self._lock = threading.Lock()
        self._flushes: list[Any] = []
        self._read_end = 0
        self._cut_line = b""
        self._lanes: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Captures UCX's log if UCX is loaded inside; the environment is restored."""
        if self._is_decided or {"UCX_LOG_FILE", "UCX_LOG_LEVEL"} & os.environ.keys():
            self._is_decided = True
            yield
            return
        self._is_decided = True
        self._fd = os.memfd_create("ucx-log")
        settings = {"UCX_LOG_FILE": f"/proc/self/fd/{self._fd}", "UCX_LOG_LEVEL": "info"}
        os.environ.update(settings)
        try:
            yield
        finally:
            # In a child process the same file descriptor may be another file.
            for name in settings:
                del os.environ[name]
            if not self._find_flushes():  # UCX was not loaded, so it will read them later.
                os.close(self._fd)
                self._fd, self._is_decided = None, False

    def lanes(self, name: str) -> str | None:
        """Lanes of the agent whose truncated name is `name`; different ones are joined."""
        self.take()
        lanes = self._lanes.get(name)
        return None if lanes is None else " | ".join(lanes)

    def take(self) -> None:
        """Keeps the lanes that UCX has logged since the last call, and passes complaints on."""
        if self._fd is None:
            return
        with self._lock:
            for flush in self._find_flushes():
                flush()
            size = os.fstat(self._fd).st_size
            if size == self._read_end:
                return
            news = self._cut_line + os.pread(self._fd, size - self._read_end, self._read_end)
            self._read_end = size
            *lines, self._cut_line = news.split(b"\n")
            for line in lines:
                self._take_line(line.decode(errors="replace"))

    def _take_line(self, line: str) -> None:
        if match := _LANE_LINE.search(line):
            transports = dict.fromkeys(_TRANSPORT.findall(match[3]))
            text = f"{match[2]}: {' + '.join(transports)}"
            lanes = self._lanes.setdefault(match[1], [])
            if text not in lanes:
                lanes.append(text)
        elif match := _COMPLAINT_LINE.search(line):
            logger.warning("UCX: %s", match[1])

    def _find_flushes(self) -> list[Any]:
        """Functions that flush UCX's buffered log; empty until UCX is loaded."""
        if not self._flushes:
            self._flushes = _ucx_flushes()
        return self._flushes


_LOG = _UcxLog()


def _ucx_flushes() -> list[Any]:
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    mapped = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    flushes = []
    for path in mapped:
        if Path(path).name.startswith("libucs"):
            with contextlib.suppress(OSError, AttributeError):
                flushes.append(ctypes.CDLL(path).ucs_log_flush)
    return flushes


def _adopt_logger() -> None:
    """Makes nixl log warnings through the root logger instead of printing to stdout."""
    nixl_logger = logging.getLogger("nixl")
    nixl_logger.handlers.clear()
    nixl_logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        nixl_logger.setLevel(logging.WARNING)
