"""Experts of a layer over engines that have a GPU each, all on one host.

Rows go to memory that the engines map, without the hosts: captured steps have them too. Which steps
all engines take, and how many rows each brings, is agreed on before (`StepForms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from weft.contract.errors import ConfigError
from weft.engine.base.device_copies import host_zeros
from weft.engine.parallel.device_peers import MappedCounters
from weft.engine.parallel.dispatch import ExchangeShape, ExpertDispatch
from weft.engine.parallel.lockstep import Lockstep
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.ops.peers.triton_experts import (
    ExpertMemory,
    RowShape,
    layout_of,
    return_rows,
    send_rows,
)
from weft.pages.transfer.device_memory import DeviceMemory, ForeignMemory, exported
from weft.pages.transfer.nixl_wire import TransferError

_PIECE_BYTES, _PIECE_ROWS = 64 << 20, 8192
"""Most rows of all ranks in one exchange. Longer steps exchange rows several times a layer."""
_HANDLE_BYTES = 64

Share = Callable[[str], Sequence[str]]
"""Gives a text to all ranks, and returns those of all, by rank."""


def row_shape(size: int, shape: ExchangeShape, dtype: torch.dtype) -> RowShape:
    """The rows that `size` ranks exchange at once."""
    most = min(_PIECE_BYTES // (shape.hidden * dtype.itemsize), _PIECE_ROWS)
    experts = shape.num_experts // size
    return RowShape(shape.hidden, dtype, shape.top_k, experts, max(1, most // size))


class DeviceDispatch(ExpertDispatch):
    """Rows that ranks with a GPU each exchange in memory that all map.

    Before `map_memory` it cannot compute.
    """

    def __init__(self, lockstep: Lockstep, shape: ExchangeShape, device: torch.device) -> None:
        super().__init__(lockstep, shape, device)
        self.memory: ExpertMemory | None = None
        """None: it is not mapped yet."""
        self._own: DeviceMemory | None = None
        self._counters: MappedCounters | None = None
        self._foreign: list[ForeignMemory] = []
        self._num_rows: int | None = None
        self._num_sent = host_zeros(1, torch.int64, device)

    def map_memory(self, share: Share) -> None:
        """Maps the memory of all ranks. All of them call it, once their weights are loaded.

        Raises:
            ConfigError: The GPUs cannot map each other's memory, or there is no room.
        """
        device_id = self._device.index or 0
        shape = row_shape(self.size, self._shape, self.layers[0].dtype)
        num_bytes = layout_of(self.size, shape).end
        try:
            self._own = own = DeviceMemory(num_bytes, device_id)
            handle, offset = exported(own.address, device_id)
            addresses = []
            for rank, text in enumerate(share(f"{handle.hex()} {offset}")):
                if rank == self.rank:
                    addresses.append(own.address)
                    continue
                theirs, begin = _parsed(text)
                foreign = ForeignMemory(theirs, device_id)
                self._foreign.append(foreign)
                if begin + num_bytes > foreign.num_bytes:
                    raise TransferError(f"worker {rank} has too little memory")
                addresses.append(foreign.address + begin)
        except TransferError as error:
            raise ConfigError(
                f"attention_dp = {self.size}: the GPUs cannot map {num_bytes:,} bytes of each "
                f"other's memory ({error}); take GPUs of one host that are linked, or "
                "attention_dp = 1",
                param="attention_dp",
            ) from error
        counters = self.lockstep.counters
        self._counters = MappedCounters(counters, self._device, "attention_dp", self.size)
        self.memory = memory_of(
            self.lockstep, shape, torch.as_tensor(own, device=self._device), addresses
        )

    def take_part(self) -> None:
        """From now on all ranks compute each layer together."""
        assert self.memory is not None
        self.memory.takes_part.fill_(1)

    def begin(self, num_rows: int | None) -> None:
        """Begins a step.

        Args:
            num_rows: Rows of each layer that each rank brings or fills up to, equal on all; None:
                the step is captured.
        """
        self._num_rows = num_rows

    def __call__(
        self, x: torch.Tensor, routing: Routing, w: ExpertWeights, residual: torch.Tensor | None
    ) -> torch.Tensor:
        if self.lockstep.is_alone:
            num_rows = x.shape[0]
        else:
            assert self._num_rows is not None, "captured steps compute no layer here"
            num_rows = self._num_rows
            self._begin_layer(w)
        assert self.memory is not None
        most, pieces = self.memory.shape.rows, list[torch.Tensor]()
        for begin in range(0, num_rows, most):
            rows = slice(begin, begin + most)
            part = Routing(routing.ids[rows], routing.weights[rows])
            own = None if residual is None else residual[rows]
            count = min(most, num_rows - begin)
            pieces.append(_exchange(self.memory, x[rows], part, w, own, count))
        if len(pieces) == 1:
            return pieces[0]
        return torch.cat(pieces) if pieces else x.clone()

    def sent_rows(self) -> tuple[int, int]:
        """Dispatched rows as the device counts them, some time ago: the host does not wait."""
        if self.memory is not None:
            self._num_sent.copy_(self.memory.num_sent, non_blocking=True)
        return 0, int(self._num_sent)

    def finish(self) -> None:
        if self._num_rows is not None:
            super().finish()

    def close(self) -> None:
        """Unmaps the memory of others, and the host's, once this rank's device is done."""
        if self._counters is not None:
            self._counters.close()
        for foreign in self._foreign:
            foreign.close()
        self._foreign.clear()
        self.memory = self._own = None


def memory_of(
    lockstep: Lockstep, shape: RowShape, own: torch.Tensor, addresses: Sequence[int]
) -> ExpertMemory:
    """A rank's view of memory that all ranks map.

    Args:
        own: [bytes] uint8 of zeros: this rank's memory.
        addresses: Of each rank's memory, in this process.
    """
    device = own.device
    words = lockstep.stop_address, lockstep.limit_address
    return ExpertMemory(
        lockstep.rank,
        lockstep.size,
        shape,
        own,
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.zeros((2, shape.rows), dtype=torch.int32, device=device),
        torch.tensor(words, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )


def _exchange(
    memory: ExpertMemory,
    x: torch.Tensor,
    routing: Routing,
    w: ExpertWeights,
    residual: torch.Tensor | None,
    num_rows: int,
) -> torch.Tensor:
    rows, here = send_rows(memory, x, routing, num_rows)
    return return_rows(memory, moe(rows, here, w), routing.ids, residual, num_rows)


def _parsed(text: str) -> tuple[bytes, int]:
    """Raises TransferError if another rank has sent no handle of memory."""
    try:
        handle, offset = text.split(" ")
        found = bytes.fromhex(handle), int(offset)
    except ValueError as error:
        raise TransferError("a worker has sent no handle of memory") from error
    if len(found[0]) != _HANDLE_BYTES or found[1] < 0:
        raise TransferError("a worker has sent no handle of memory")
    return found
