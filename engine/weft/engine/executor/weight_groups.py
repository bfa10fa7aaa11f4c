"""Process groups through which a trainer, their rank 0, broadcasts weights to workers.

gloo                 PyTorch's, over sockets to the host's memory
nccl, rendezvous     PyTorch's, to a GPU; as SGLang's trainers make it
  torch
nccl, rendezvous     a bare communicator, to a GPU; as vLLM's trainers make it
  vllm
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous
from weft.contract.errors import ConfigError, GroupFailed
from weft.contract.weights import WeightGroup
from weft.engine.parallel.nccl import Communicator
from weft.engine.parallel.nccl_id import read_pickled_id

_POLL_S = 0.0005
_VLLM_KEY = "broadcast_from/0/0"
_WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Broadcasts(Protocol):
    """One process's membership of a group, for one thread."""

    device: torch.device
    """Where tensors are received."""

    def receive(self, out: torch.Tensor) -> None:
        """Fills a contiguous tensor on `device` with rank 0's. Raises GroupFailed if that does not
        end in time.
        """

    def close(self) -> None:
        """Leaves the group, also after a broadcast that has not ended."""


def join(group: WeightGroup, rank: int, device: torch.device) -> Broadcasts:
    """Joins as rank `rank` of the worker. Waits for all other members, at most `group.wait_s`.
    Raises GroupFailed if they do not come, ConfigError if this device cannot be a member.
    """
    if group.backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"backend nccl needs GPUs, this worker computes on {device.type}: use gloo",
            param="backend",
        )
    if group.rendezvous == "vllm" and group.backend != "nccl":
        raise ConfigError("this rendezvous is for backend nccl", param="backend")
    own = group.rank + rank
    if own >= group.size:
        raise ConfigError(
            f"rank {own} of a group of {group.size}: rank_offset and world_size leave no place for "
            "all ranks",
            param="world_size",
        )
    try:
        if group.rendezvous == "vllm":
            return _BareGroup(group, own, device)
        return _TorchGroup(group, own, device)
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise GroupFailed(
            f"the group {group.name} at {group.address}:{group.port} did not form: {_first(error)}"
        ) from error


class _TorchGroup:
    def __init__(self, group: WeightGroup, rank: int, device: torch.device) -> None:
        self._name, self._wait = group.name, timedelta(seconds=group.wait_s)
        is_gloo = group.backend == "gloo"
        self.device = torch.device("cpu") if is_gloo else device
        where = group.address if ":" not in group.address else f"[{group.address.strip('[]')}]"
        made = rendezvous(f"tcp://{where}:{group.port}", rank, group.size, timeout=self._wait)
        found, _, _ = next(made)
        found.set_timeout(self._wait)
        # The prefixes of `torch.distributed`, which the trainer uses.
        kinds = c10d.BackendConfig(c10d.Backend(group.backend)).get_device_backend_map()
        store: Any = c10d.PrefixStore(f"{group.name}/", c10d.PrefixStore(group.name, found))
        store = c10d.PrefixStore(f"{next(iter(kinds))}/", store)
        self._group: Any = (
            c10d.ProcessGroupGloo(store, rank, group.size, self._wait)
            if is_gloo
            else _nccl_group(store, rank, group.size)
        )

    def receive(self, out: torch.Tensor) -> None:
        options = c10d.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = self._wait
        try:
            work = self._group.broadcast([out], options)
            if self.device.type == "cpu":
                work.wait()
            else:
                _await(work.is_completed, self._wait.total_seconds())
                work.wait()
        except (RuntimeError, TimeoutError) as error:
            raise _unended(self._name, error) from error

    def close(self) -> None:
        with suppress(RuntimeError):
            if self.device.type != "cpu":
                self._group.abort()
        self._group = None


class _BareGroup:
    def __init__(self, group: WeightGroup, rank: int, device: torch.device) -> None:
        self.device, self._name, self._wait_s = device, group.name, group.wait_s
        number = group.nccl_id
        if not number:
            wait = timedelta(seconds=group.wait_s)
            # It is kept until the communicator exists: its server may count its clients.
            store = TCPStore(group.address, group.port, group.size, False, timeout=wait)
            number = read_pickled_id(store.get(_VLLM_KEY))
        self._communicator = Communicator(number, rank, group.size, device, group.wait_s)
        stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            # As vLLM's, which all members do together. Steps go on, and must not wait for them.
            with torch.cuda.stream(stream):
                self._communicator.all_reduce(torch.zeros(1, device=device))
                self._await_stream()
        except BaseException:
            self._communicator.abort()
            raise

    def receive(self, out: torch.Tensor) -> None:
        try:
            self._communicator.broadcast(out)
            self._await_stream()
        except (RuntimeError, TimeoutError) as error:
            raise _unended(self._name, error) from error

    def close(self) -> None:
        self._communicator.abort()

    def _await_stream(self) -> None:
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self.device))
        _await(done.query, self._wait_s)


def _nccl_group(store: Any, rank: int, size: int) -> Any:
    """Without its watchdog, which would end the process when a trainer dies."""
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(days=1)
    known = os.environ.get(_WATCHDOG)
    os.environ[_WATCHDOG] = "0"
    try:
        return c10d.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if known is None:
            del os.environ[_WATCHDOG]
        else:
            os.environ[_WATCHDOG] = known


def _await(is_done: Callable[[], bool], wait_s: float) -> None:
    ends_at = time.monotonic() + wait_s
    while not is_done():
        if time.monotonic() > ends_at:
            raise TimeoutError(f"not within {wait_s:g} s")
        time.sleep(_POLL_S)


def _unended(name: str, error: Exception) -> GroupFailed:
    return GroupFailed(f"a broadcast in the group {name} did not end: {_first(error)}")


def _first(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]
