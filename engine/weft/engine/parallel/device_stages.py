"""How stages on GPUs of one host hand over the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from weft.contract.errors import ConfigError
from weft.engine.parallel.device_peers import MappedCounters, MappedMemory
from weft.engine.parallel.shared import SharedGroup
from weft.engine.parallel.stages import stage_of_rank
from weft.kernels.ops.peers.triton_stage import (
    StageMemory,
    memory_bytes,
    receive_rows,
    send_rows,
)


class DeviceStages:
    """Implements `weft.engine.model.stage.Neighbours` through memory that the GPUs map. Neither
    call waits on the host. Each rank of a stage has the whole stream and hands it to one rank of
    the next stage.

    Args:
        device: GPU of this rank. Ranks that share one, as in tests, take turns on it.
        mapped: Makes memory that all ranks map.
        rows: Most rows of a step.
        width: Entries of a row.
        tp: Ranks of each stage. With several the group's counters are mapped already.

    Raises:
        ConfigError: The GPUs cannot map each other's memory.
    """

    def __init__(
        self,
        group: SharedGroup,
        device: torch.device,
        mapped: MappedMemory,
        rows: int,
        width: int,
        dtype: torch.dtype,
        tp: int = 1,
    ) -> None:
        self.rank, size = group.rank, group.size
        self.tp = tp
        row_bytes = width * torch.empty(0, dtype=dtype).element_size()
        num_bytes = memory_bytes(row_bytes, rows)
        try:
            _, handle = mapped.map(num_bytes)
        except RuntimeError as error:
            raise ConfigError(
                f"pp = {size // tp}: the GPUs cannot map each other's memory ({error}); take GPUs "
                "that are linked, or pp = 1",
                param="pp",
            ) from error
        self._group, self._device, self.mapped = group, device, mapped
        self._nothing = torch.zeros((1, width), dtype=dtype, device=device)
        pointers = [int(pointer) for pointer in handle.buffer_ptrs]
        self._counters: MappedCounters | None = None
        if tp == 1:
            self._counters = MappedCounters(group.words, device, "pp", size)
        words = [group.stop_address, group.limit_address]
        control = torch.tensor(words, dtype=torch.int64, device=device)

        def link(other: int, receiver: int, sender: int) -> StageMemory:
            turns = torch.zeros(1, dtype=torch.int32, device=device)
            capacity, ends = rows * row_bytes // 4, (pointers[receiver], pointers[sender])
            told = (other, size) if tp == 1 else (other % tp, tp)
            return StageMemory(*told, capacity, *ends, turns, control)

        rank, count = self.rank, size // tp
        stage = stage_of_rank(rank, count, tp)
        self._before: StageMemory | None = None
        self._after: StageMemory | None = None
        if stage > 0:
            before = (rank - tp) % size
            self._before = link(before, rank, before)
        if stage < count - 1:
            after = (rank + tp) % size
            self._after = link(after, after, rank)

    def receive(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        assert self._before is not None, "the first stage receives nothing"
        out = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        return receive_rows(self._before, out)

    def send(self, stream: torch.Tensor) -> None:
        assert self._after is not None, "the last stage sends nothing"
        send_rows(self._after, stream.contiguous())

    def meet(self) -> None:
        """Makes the device of each stage wait, after its work so far, for that of the stages before
        it. All stages call it between two steps.
        """
        if self._before is not None:
            self.receive(self._nothing.shape, self._nothing.dtype)
        if self._after is not None:
            self.send(self._nothing)

    def close(self) -> None:
        """Unmaps the host's memory. No kernel may wait any more."""
        if self._counters is not None:
            self._counters.close()
