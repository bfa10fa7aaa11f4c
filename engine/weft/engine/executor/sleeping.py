"""Memory of one rank that is given back to the system while the rank sleeps.

Addresses stay, as native operations, CUDA graphs and peers know them. On a CPU the system takes the
pages behind them; on a GPU the driver does (`DeviceArena`).
"""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import IO, NamedTuple, Protocol, TypeAlias

import torch
from weft.contract.errors import ConfigError, Internal, WeftError
from weft.engine.executor.device_arena import DeviceArena
from weft.engine.executor.memory_spans import Span, spans_of, without
from weft.engine.executor.orders import Sleep, Wake
from weft.engine.executor.rank_jobs import Combine, RankJobs, RankResult, of_one_rank
from weft.kernels.shared.memory import give_back

logger = logging.getLogger(__name__)

TensorsOf: TypeAlias = Callable[[], Sequence[torch.Tensor]]
_PIECE_BYTES = 64 << 20


class Memory(Protocol):
    """Memory that can be given back. Both calls are idempotent."""

    def leave(self, *, keeps: bool) -> None:
        """Gives the memory back; with `keeps` its content is put away before.

        Raises:
            ConfigError: There is no room for it; nothing is given back then.
            OSError: Some of the memory was given back. `come_back` takes it again.
        """
        ...

    def come_back(self) -> None:
        """Takes the memory again, with the content that was put away. Raises ConfigError if there
        is not enough; it is still away then.
        """
        ...


class HostWeights:
    """Weights in the memory of a CPU. They are put away in files without a name.

    Args:
        tensors: Returns the parameters that an update fills.
        folder: Where the files lie; empty: the system's folder for such files.
        beside: Returns the tensors that no update fills, some of which may be `tensors`. They are
            always put away.
    """

    def __init__(self, tensors: TensorsOf, folder: str, beside: TensorsOf = list) -> None:
        self._updated = _HostBytes(lambda: spans_of(tensors()), folder)
        self._others = _HostBytes(lambda: without(spans_of(beside()), spans_of(tensors())), folder)

    def leave(self, *, keeps: bool) -> None:
        self._others.leave(keeps=True)
        try:
            self._updated.leave(keeps=keeps)
        except (ConfigError, OSError):
            self._others.come_back()
            raise

    def come_back(self) -> None:
        self._updated.come_back()
        self._others.come_back()


class _HostBytes:
    def __init__(self, spans: Callable[[], list[Span]], folder: str) -> None:
        self._find = spans
        self._folder = folder or None
        self._spans = list[Span]()
        self._file: IO[bytes] | None = None
        self._is_away = False

    def leave(self, *, keeps: bool) -> None:
        if self._is_away and (keeps or self._file is None):
            return
        if self._is_away:
            self._close()
            return
        self._spans = self._find()
        if keeps:
            self._save()
        try:
            for span in self._spans:
                give_back(span.begin, span.end - span.begin)
        except OSError as error:
            if not keeps:
                raise
            self._restore()
            raise ConfigError(f"the weights' memory cannot be given back: {error}") from error
        self._is_away = True

    def come_back(self) -> None:
        if self._is_away:
            self._restore()
        self._is_away = False

    def _save(self) -> None:
        size = sum(span.end - span.begin for span in self._spans)
        folder = self._folder or tempfile.gettempdir()
        try:
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115  It stays.
            number, at = self._file.fileno(), 0
            os.posix_fallocate(number, 0, max(1, size))
            for data in _pieces(self._spans):
                for begin in range(0, len(data), _PIECE_BYTES):
                    at += os.pwrite(number, data[begin : begin + _PIECE_BYTES], at)
            if at != size:
                raise OSError(f"{at:,} bytes were written")
        except OSError as error:
            self._close()
            raise ConfigError(
                f"no room for {size:,} bytes of weights in {folder}: {error}; set sleep_dir",
                param="sleep_dir",
            ) from error

    def _restore(self) -> None:
        if self._file is None:
            return
        number, at = self._file.fileno(), 0
        try:
            for data in _pieces(self._spans):
                for begin in range(0, len(data), _PIECE_BYTES):
                    at += os.preadv(number, [data[begin : begin + _PIECE_BYTES]], at)
            if at != sum(span.end - span.begin for span in self._spans):
                raise OSError(f"only {at:,} bytes could be read")
        except OSError as error:
            raise ConfigError(f"the weights that were put away cannot be read: {error}") from error
        self._close()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _pieces(spans: Sequence[Span]) -> Iterator[memoryview]:
    """The memory itself, span after span."""
    for begin, end in spans:
        yield memoryview((ctypes.c_uint8 * (end - begin)).from_address(begin)).cast("B")


class HostPools:
    """KV pools in the memory of a CPU. What they hold is never kept.

    Args:
        shared: Pools that several ranks map.
    """

    def __init__(self, own: Sequence[torch.Tensor], shared: Sequence[torch.Tensor] = ()) -> None:
        self._own, self._shared = own, shared

    def leave(self, *, keeps: bool) -> None:
        try:
            for pools, is_shared in ((self._own, False), (self._shared, True)):
                for pool in pools:
                    give_back(pool.data_ptr(), pool.nbytes, is_shared=is_shared)
        except OSError as error:
            raise ConfigError(f"the KV pool's memory cannot be given back: {error}") from error

    def come_back(self) -> None:
        """Does nothing: the system gives memory as it is first written."""


class SleepMemory(NamedTuple):
    """Where what sleeps lies, and what is put away."""

    weights: DeviceArena | None = None
    """A GPU's; None: its weights do not sleep, or the model is on a CPU."""
    pools: DeviceArena | None = None
    """As `weights`, for KV pools, which stay where peers map them."""
    folder: str = ""
    """For weights on a CPU; empty: the system's for files that nobody needs later."""
    problem: str = ""
    """Why weights do not sleep; empty: they do."""

    def loading(self) -> AbstractContextManager[None]:
        """A block in which the weights are made."""
        return nullcontext() if self.weights is None else self.weights.taking()


class Sleeper:
    """Puts one rank's memory to sleep and wakes it, one order at a time. Belongs to the thread that
    runs the steps.

    Args:
        weights: None: they cannot sleep.
        pages: None: they stay.
        problem: Why the weights cannot sleep.
        can_drop: Whether an update could bring weights that were dropped.
    """

    def __init__(
        self,
        weights: Memory | None,
        pages: Memory | None,
        device: torch.device,
        problem: str = "",
        *,
        can_drop: bool = True,
        combine: Combine = of_one_rank,
    ) -> None:
        self.can_drop = can_drop
        self._weights, self._pages = weights, pages
        self._device = device
        self.problem = problem
        self.jobs = RankJobs("sleep", device, combine)

    def begin(self, order: Sleep | Wake) -> None:
        self.jobs.begin(lambda: self._obeyed(order))

    def _obeyed(self, order: Sleep | Wake) -> RankResult:
        weights = self._weights if order.weights else None
        pages = self._pages if order.pages else None
        is_dropped = False
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            if isinstance(order, Wake):
                for memory in filter(None, (weights, pages)):
                    memory.come_back()
                return RankResult()
            if weights is not None:
                weights.leave(keeps=order.keeps_weights)
                is_dropped = not order.keeps_weights
            if pages is not None:
                pages.leave(keeps=False)
        except WeftError as error:
            return RankResult(problem=error.message, reason=error.reason, is_mixture=is_dropped)
        except Exception as error:
            logger.exception("memory was not given back or taken")
            problem = f"{type(error).__name__}: {error}"
            return RankResult(problem=problem, reason=Internal.reason, is_mixture=True)
        return RankResult(is_mixture=is_dropped)
