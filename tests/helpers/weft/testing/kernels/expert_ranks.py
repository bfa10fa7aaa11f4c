"""Processes that exchange rows of experts as ranks with a GPU each do, by Triton's interpreter on
memory of the host.

    python -m weft.testing.kernels.expert_ranks FD BYTES SIZE SEED RANK FILE
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import torch
from weft.engine.parallel import device_dispatch
from weft.engine.parallel.device_dispatch import DeviceDispatch, memory_of, row_shape
from weft.engine.parallel.dispatch import ExchangeShape
from weft.engine.parallel.lockstep import Lockstep, lockstep_bytes
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.ops.peers.triton_experts import layout_of
from weft.testing.kernels.as_on_gpu import as_on_gpu

HIDDEN, INNER, TOP_K, EXPERTS_OF_RANK, LAYERS = 24, 16, 3, 4, 2
PIECE_ROWS = 2
"""Most rows of a rank in one exchange."""
LIMIT_S = 60.0
NEARLY_AROUND = (1 << 31) - 2
"""Exchanges so far, of which the next ones wrap around."""


class Part(NamedTuple):
    """What one rank brings to a step."""

    x: torch.Tensor
    routing: Routing
    residual: torch.Tensor
    num_layers: int
    """Layers that the step computes."""


def shape_of(size: int) -> ExchangeShape:
    """Sizes of an exchange of so many ranks."""
    return ExchangeShape(size, HIDDEN, TOP_K, EXPERTS_OF_RANK * size)


def experts_of(size: int, rank: int | None, seed: int) -> list[ExpertWeights]:
    """The experts of each layer: a rank's share, or all of them."""
    draws = torch.Generator().manual_seed(seed)
    count, layers = EXPERTS_OF_RANK * size, list[ExpertWeights]()
    for _ in range(LAYERS):
        every = [
            (
                torch.randn(2 * INNER, HIDDEN, generator=draws) / 4,
                torch.randn(HIDDEN, INNER, generator=draws) / 4,
            )
            for _ in range(count)
        ]
        if rank is None:
            layers.append(pack_experts(every, count))
            continue
        first = EXPERTS_OF_RANK * rank
        own = slice(first, first + EXPERTS_OF_RANK)
        placement = torch.full((count,), EXPERTS_OF_RANK, dtype=torch.int32)
        placement[own] = torch.arange(EXPERTS_OF_RANK, dtype=torch.int32)
        layers.append(pack_experts(every[own], EXPERTS_OF_RANK, placement=placement))
    return layers


def steps_of(size: int, seed: int) -> list[list[Part]]:
    """What each rank brings to each step, drawn alike by all: one has no rows, or more than one
    exchange takes, or rows whose experts are all its own, or leaves the last layer out.
    """
    draws = torch.Generator().manual_seed(seed)
    steps = []
    for counts in ((1, 0, 3, 2), (2 * PIECE_ROWS + 1, 1, 0, 4), (0, 2, 1, 1), (2, 2, 2, 2)):
        step = []
        for rank, count in enumerate(counts[:size]):
            own = torch.rand(count, EXPERTS_OF_RANK * size, generator=draws)
            if len(steps) == 3:  # All chosen experts are of one rank.
                other = (rank + 1) % size * EXPERTS_OF_RANK
                own[:, other : other + EXPERTS_OF_RANK] += 1
            ids = own.topk(TOP_K).indices.sort().values.to(torch.int32)
            shares = torch.rand(count, TOP_K, generator=draws)
            x = torch.randn(count, HIDDEN, generator=draws)
            residual = torch.randn(count, HIDDEN, generator=draws)
            num_layers = LAYERS if count and len(steps) != 2 else min(count, 1)
            step.append(Part(x, Routing(ids, shares), residual, num_layers))
        steps.append(step)
    return steps


class Found(NamedTuple):
    """What one rank has found."""

    results: list[list[torch.Tensor]]
    """For each step the result of each layer that it computes, all of the same input."""
    num_sent: int
    """Rows sent to other ranks."""


def run_ranks(size: int, seed: int, folder: Path) -> list[Found]:
    """What each rank has found."""
    bytes_of_rank = layout_of(size, _shape_of_rows(size)).end
    segment = Segment.create(lockstep_bytes(size) + size * bytes_of_rank, "test")
    processes = []
    try:
        for rank in range(size):
            given = segment.number, segment.size, size, seed, rank, folder / str(rank)
            command = [sys.executable, "-m", __name__, *map(str, given)]
            processes.append(subprocess.Popen(command, pass_fds=(segment.number,)))
        assert [one.wait(120) for one in processes] == [0] * size
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return [Found(*torch.load(folder / str(rank))) for rank in range(size)]


def run_rank(
    segment: Segment, size: int, seed: int, rank: int, layers: list[ExpertWeights]
) -> Found:
    """See `run_ranks`."""
    shape = _shape_of_rows(size)
    layout, begin = layout_of(size, shape), lockstep_bytes(size)
    parts = [
        torch.from_numpy(segment.bytes_at(begin + one * layout.end, layout.end))
        for one in range(size)
    ]
    woken = threading.Event()
    lockstep = Lockstep(segment, rank, size, LIMIT_S, woken.set)
    dispatch = DeviceDispatch(lockstep, shape_of(size), torch.device("cpu"))
    dispatch.layers = layers
    addresses = [part.data_ptr() for part in parts]
    memory = memory_of(lockstep, shape, parts[rank], addresses)
    dispatch.memory = memory._replace(turns=memory.turns + NEARLY_AROUND)
    parts[rank][: layout.ids].view(torch.int32).fill_(NEARLY_AROUND)
    steps, found = steps_of(size, seed), list[list[torch.Tensor]]()
    # Alone, ranks do not wait for others, which may be doing something else.
    for part in (step[rank] for step in steps[: 1 + rank]):
        if len(part.x):
            dispatch(part.x, part.routing, dispatch.layers[0], part.residual)
    lockstep.begin_together()
    dispatch.take_part()
    lockstep.meet()
    for step in steps:
        part = step[rank]
        dispatch.begin(max(lockstep.propose(len(part.x))))
        computed = layers[: part.num_layers]
        found.append([dispatch(part.x, part.routing, w, part.residual) for w in computed])
        dispatch.finish()
    lockstep.meet()
    dispatch.sent_rows()
    return Found(found, dispatch.sent_rows()[1])


def _shape_of_rows(size: int) -> device_dispatch.RowShape:
    return row_shape(size, shape_of(size), torch.float32)._replace(rows=PIECE_ROWS)


def main(argv: list[str]) -> None:
    """Computes as one rank."""
    number, num_bytes, size, seed, rank = map(int, argv[:5])
    layers = experts_of(
        size, rank, seed
    )  # In a CPU's form, which the interpreter does not compute.
    with as_on_gpu():
        found = run_rank(Segment(number, num_bytes), size, seed, rank, layers)
    torch.save(tuple(found), argv[5])


if __name__ == "__main__":
    main(sys.argv[1:])
