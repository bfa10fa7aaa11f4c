"""Ranks that have a GPU each, all on one host."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric
from weft.contract.errors import ConfigError
from weft.engine.parallel.device_page_ranks import MAX_ROWS, DevicePageRanks
from weft.engine.parallel.shared import SharedGroup
from weft.kernels.ops.attention.spec import PageRanks
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.peers import triton_pages
from weft.kernels.ops.peers.triton_logits import LogitsMemory, gather_logits, memory_bytes
from weft.kernels.ops.peers.triton_sum import (
    PeerMemory,
    layout_of,
    num_turns,
    share_tokens,
    sum_rows,
)

_ONCE_BYTES = {2: 4 << 20, 4: 256 << 10, 8: 128 << 10}
"""Bytes of the largest sum with one exchange, by number of ranks. With two ranks, one exchange and
two send the same bytes.
"""
_TWICE_BYTES = 16 << 20
"""Most bytes that one launch adds up."""
_LOGITS_ROWS, _LOGITS_BYTES = 1024, 128 << 20
"""Most logits that ranks compute together. For more rows the first rank computes all."""
_PORTABLE_AND_MAPPED = 3


class MappedMemory:
    """Memory of ranks with a GPU each, which all of them map.

    Args:
        device: GPU of this rank. Ranks that share one, as in tests, take turns on it.
        ranks: The process group by which torch knows the ranks, from `join`.
        agree: Waits until all ranks have reached a phase, and raises the error of another rank.
    """

    def __init__(
        self, device: torch.device, ranks: dist.ProcessGroup, agree: Callable[[str], object]
    ) -> None:
        self._device, self._ranks, self._agree = device, ranks, agree
        self._kept: list[object] = []

    def map(self, num_bytes: int) -> tuple[torch.Tensor, Any]:
        """Makes zeros of [num_bytes] uint8 on each rank. All ranks call it together, with the same
        number. Returns this rank's, and torch's handle on those of all. Raises RuntimeError if the
        memory does not fit on this rank, and WeftError if another rank has failed.
        """
        memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=self._device)
        memory.zero_()
        torch.cuda.synchronize(self._device)
        # The others must not wait in torch's exchange for a rank that had no room.
        self._agree("allocated")
        handle: Any = symmetric.rendezvous(memory, self._ranks)
        self._kept += [memory, handle]
        return memory, handle

    def memory(self, num_bytes: int) -> list[torch.Tensor]:
        """As `map`: the memory of every rank, which kernels and copies of this rank can read and
        write.
        """
        _, handle = self.map(num_bytes)
        ranks = range(self._ranks.size())
        return [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in ranks]


class MappedCounters:
    """Counters of a group in host memory; kernels read them once they have waited for long.

    Args:
        place: Address and number of bytes, whole pages.
        device: Whose kernels look at them.
        option: The setting that needs them, for messages.

    Raises:
        ConfigError: CUDA does not map them.
    """

    def __init__(
        self, place: tuple[int, int], device: torch.device, option: str, value: int
    ) -> None:
        self._address, self._device, self._is_open = place[0], device, True
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = int(self._runtime.cudaHostRegister(*place, _PORTABLE_AND_MAPPED))
        if status:
            raise ConfigError(f"{option} = {value}: cudaHostRegister: error {status}", param=option)

    def close(self) -> None:
        """Waits for the device, and unmaps them; a further call does nothing. CUDA would refuse to
        unmap them again, and PyTorch would raise that error at the next kernel.
        """
        if self._is_open:
            self._is_open = False
            torch.cuda.synchronize(self._device)
            self._runtime.cudaHostUnregister(self._address)


class DevicePeers:
    """Implements `weft.kernels.ops.peers.spec.GpuPeers` through memory that all ranks map.

    Args:
        device: GPU of this rank. Ranks that share one, as in tests, take turns on it.
        ranks: The process group by which torch knows the ranks, from `join`.
        width: Entries of a row of the residual stream.
        agree: Waits until all ranks have reached a phase, and raises the error of another rank.
        tp: So many consecutive ranks add up sums, those of a stage; None: all ranks.

    Raises:
        ConfigError: The GPUs cannot map each other's memory.
    """

    device_type: Literal["cuda"] = "cuda"

    def __init__(
        self,
        group: SharedGroup,
        device: torch.device,
        ranks: dist.ProcessGroup,
        width: int,
        dtype: torch.dtype,
        columns: int,
        agree: Callable[[str], object],
        tp: int | None = None,
    ) -> None:
        self.size = group.size if tp is None else tp
        self.rank = group.rank % self.size
        first = group.rank - self.rank
        self._members = slice(first, first + self.size)
        self.width: int | None = width
        self.pages: PageRanks | None = None
        self.sums = f"in the GPUs' memory, {link_of(_devices_of(device, ranks)[self._members])}"
        """How partial sums are added up, in words."""
        self._group, self._device = group, device
        self.mapped = MappedMemory(device, ranks, agree)
        itemsize = torch.empty(0, dtype=dtype).element_size()
        once, twice = rows_of(self.size, width * itemsize)
        layout = layout_of(self.size, width * itemsize, once, twice)
        try:
            _, bases = self._map(layout.end)
            rows = min(_LOGITS_ROWS, _LOGITS_BYTES // (4 * columns))
            num_bytes = memory_bytes(self.size, columns, rows)
            of_logits, bases_of_logits = self._map(num_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"tp = {self.size}: the GPUs cannot map each other's memory ({error}); take GPUs "
                "that are linked, or tp = 1",
                param="tp",
            ) from error
        self._counters = MappedCounters(group.words, device, "tp", self.size)
        words = [group.stop_address, group.limit_address]
        control = torch.tensor(words, dtype=torch.int64, device=device)
        self._memory = PeerMemory(
            self.rank,
            self.size,
            width,
            itemsize,
            once,
            twice,
            bases,
            torch.zeros(num_turns(once, twice), dtype=torch.int32, device=device),
            control,
        )
        self._nothing = torch.zeros((1, width), dtype=dtype, device=device)
        self._logits = LogitsMemory(
            self.rank,
            self.size,
            columns,
            rows,
            of_logits[: 4 * rows * columns].view(torch.float32).view(rows, columns),
            bases_of_logits,
            torch.zeros(rows, dtype=torch.int32, device=device),
            control,
        )

    def _map(self, num_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory of zeros on this rank, and the addresses at which this process has that of the
        ranks with which it adds up sums.
        """
        memory, handle = self.mapped.map(num_bytes)
        pointers = [int(pointer) for pointer in list(handle.buffer_ptrs)[self._members]]
        return memory, torch.tensor(pointers, dtype=torch.int64, device=self._device)

    def divide_pages(self, size: int, heads: int, dim: int, value_dim: int, itemsize: int) -> None:
        """Lets each `size` consecutive ranks divide the pages of their KV heads. All ranks call it
        together. Raises ConfigError if the memory for it does not fit.

        Args:
            heads: Query heads of each rank.
            dim: Elements of a query.
            value_dim: Elements of attention's result.
            itemsize: Bytes of an element.
        """
        sizes = heads, dim, value_dim, itemsize, MAX_ROWS
        num_bytes = triton_pages.layout_of(size, *sizes).end
        try:
            _, bases = self._map(num_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"dcp = {size}: {num_bytes:,} bytes for queries and results: {error}", param="dcp"
            ) from error
        first = self.rank // size * size
        num_programs = MAX_ROWS * triton_pages.blocks_of(heads)
        turns = torch.zeros((2, num_programs), dtype=torch.int32, device=self._device)
        memory = triton_pages.PagesMemory(
            *(self.rank - first, size, *sizes),
            *(bases[first : first + size].contiguous(), turns, self._memory.control),
        )
        self.pages = DevicePageRanks(memory)

    def close(self) -> None:
        """Unmaps the host's memory. No kernel may wait any more."""
        self._counters.close()

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = torch.empty_like(residual)
        sum_rows(self._memory, partial.to(residual.dtype), residual, total)
        return total

    def add_norm(
        self,
        partial: torch.Tensor,
        stream: torch.Tensor,
        norm: Norm | None,
        tap: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        return sum_rows(self._memory, partial, stream, stream, norm, tap)

    def meet(self) -> None:
        """Waits, on the device, until the devices of all ranks have reached this call."""
        sum_rows(self._memory, self._nothing, self._nothing, self._nothing)

    def share_of_logits(self, rows: int) -> slice | None:
        """The tokens whose logits this rank computes; None: the first rank computes all."""
        return self._logits.share if rows <= self._logits.rows else None

    def gather_logits(self, part: torch.Tensor) -> torch.Tensor:
        return gather_logits(self._logits, part)

    def share_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies the tokens of rank 0 to all ranks."""
        return share_tokens(self._memory, tokens)


def join(rank: int, size: int, store_path: str) -> dist.ProcessGroup:
    """Makes the process group by which ranks exchange the handles of their memory. A process can
    have only one in its life, since torch numbers its exchanges by process.

    Args:
        store_path: A file that all ranks use to find one another, new for each group.

    Raises:
        ConfigError: This process has already had a group.
    """
    if dist.is_initialized():
        raise ConfigError(
            f"tp = {size}: a process can have one engine with ranks on GPUs; start another process",
            param="tp",
        )
    # Symmetric memory must not use multicast: a program that multicasts can stop a whole host.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    store = dist.FileStore(store_path, size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = dist.group.WORLD
    assert group is not None
    return group


def _devices_of(device: torch.device, ranks: dist.ProcessGroup) -> list[int]:
    own = torch.tensor([device.index or 0])
    found = [torch.empty_like(own) for _ in range(ranks.size())]
    dist.all_gather(found, own, group=ranks)
    return [int(number) for number in found]


def link_of(devices: Sequence[int]) -> str:
    """How GPUs of this host reach one another's memory, in words.

    Args:
        devices: Their numbers, as torch counts them.
    """
    pairs = list(permutations(set(devices), 2))
    if not pairs:
        return "which is one GPU's"
    try:
        from torch._C import _distributed_c10d as c10d

        detect: Any = c10d._detect_dma_connectivity  # type: ignore[attr-defined]
        links = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except (RuntimeError, AttributeError, ImportError):
        # NVML does not say, or torch no longer has this private function.
        return "over a link that is not known"
    return "over NVLink" if all(links[one][other] for one, other in pairs) else "over PCIe"


def rows_of(size: int, row_bytes: int) -> tuple[int, int]:
    """Most rows of a sum with one exchange, and of a sum with two. The two are equal if two
    exchanges take no more rows.
    """
    most_bytes = next(most for ranks, most in _ONCE_BYTES.items() if size <= ranks or ranks == 8)
    once = max(1, most_bytes // row_bytes)
    twice = max(1, _TWICE_BYTES // row_bytes // size) * size
    return once, size if once >= twice else twice
