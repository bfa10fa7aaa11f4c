"""A layer's experts over workers that share them, in both forms in which rows can be sent.

    python bench/expert_exchange.py [--ranks 2 4 8] [--rows 1 16 64 256]

Each worker is a process with one thread and rows of its own. A row chooses its experts at random.
The times are a layer's: the processor time of all workers, and what passes until the last one ends.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection

import torch
from harness import Harness, Run, ratio_of, spread
from weft.engine.parallel.dispatch import ExchangeShape, HostDispatch
from weft.engine.parallel.lockstep import Lockstep
from weft.engine.parallel.segment import Segment
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import Routing

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 192, 64, 8
LIMIT_S = 60.0
LAYERS = 5
"""Layers of one measurement."""
FORMS = {"gathered": 1 << 30, "dispatched": 0}
"""Rows from which they are dispatched."""


def worker(
    segment: Segment, shape: ExchangeShape, rank: int, form: str, rows: int, end: Connection
) -> None:
    """Sends the seconds of a layer, and those of its processor, once for each message."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    own = EXPERTS // shape.size
    numbers = range(rank * own, (rank + 1) * own)
    experts = (
        (torch.randn(2 * INNER, HIDDEN).bfloat16() / 50, torch.randn(HIDDEN, INNER).bfloat16() / 50)
        for _ in numbers
    )
    placement = torch.full((EXPERTS,), own, dtype=torch.int32)
    placement[numbers.start : numbers.stop] = torch.arange(own, dtype=torch.int32)
    w = pack_experts(experts, own, placement=placement)
    lockstep = Lockstep(segment, rank, shape.size, LIMIT_S, lambda: None)
    dispatch = HostDispatch(lockstep, segment, shape, FORMS[form])
    dispatch.layers = [w] * LAYERS
    x = torch.randn(rows, HIDDEN).bfloat16()
    ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.sort().values.to(torch.int32)
    routing = Routing(ids, torch.rand(rows, TOP_K))
    lockstep.begin_together()
    while end.recv():
        lockstep.begin()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(LAYERS):
            dispatch(x, routing, w, x)
        passed, used = time.perf_counter() - began, time.process_time() - used
        end.send((passed / LAYERS, used / LAYERS))
        dispatch.finish()


class Group:
    """Workers of one form."""

    def __init__(self, size: int, form: str, rows: int) -> None:
        shape = ExchangeShape(size, HIDDEN, TOP_K, EXPERTS)
        segment = Segment.create(shape.num_bytes, "experts")
        fork = multiprocessing.get_context("fork")
        pairs = [fork.Pipe() for _ in range(size)]
        self._ends = [ours for ours, _ in pairs]
        self._workers = [
            fork.Process(target=worker, args=(segment, shape, rank, form, rows, theirs))
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for each in self._workers:
            each.start()

    def layer_s(self) -> tuple[float, float]:
        """Seconds until the last worker ended, and processor seconds of all."""
        for end in self._ends:
            end.send(True)
        passed, used = zip(*(end.recv() for end in self._ends), strict=True)
        return max(passed), sum(used)

    def close(self) -> None:
        for end in self._ends:
            end.send(False)
        for each in self._workers:
            each.join()


harness = Harness(__file__, __doc__, repeats=5)
harness.flag("--ranks", type=int, nargs="+", default=[2, 4, 8])
harness.flag("--rows", type=int, nargs="+", default=[1, 16, 64, 256])


@harness.part
def layers(run: Run) -> None:
    for size in run.options.ranks:
        for rows in run.options.rows:
            passed: dict[str, list[float]] = {form: [] for form in FORMS}
            used: dict[str, list[float]] = {form: [] for form in FORMS}
            groups = {form: Group(size, form, rows) for form in FORMS}
            for turn in range(-1, run.options.repeats):
                for form, group in groups.items():
                    of_layer, of_processors = group.layer_s()
                    if turn >= 0:
                        passed[form].append(of_layer)
                        used[form].append(of_processors)
            for group in groups.values():
                group.close()
            run.row(
                ranks=size,
                rows=rows,
                **{f"{form}_us": spread(times, 1e6) for form, times in passed.items()},
                **{f"{form}_processor_us": spread(times, 1e6) for form, times in used.items()},
                gathered_over_dispatched=ratio_of(used["gathered"], used["dispatched"]),
            )


if __name__ == "__main__":
    sys.exit(harness.main())
