"""The cost of a thread that reads adapters for the engine thread of a GPU worker.

    python bench/give_way.py [--steps 400]

A thread in place of the engine's calls torch some dozens of times, like a step on the host, and
then rests as if for the device. Beside it adapters of Llama-3.1-8B's shape are read all the time:
with and without giving way
(`weft.contract.give_way`), and not at all.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from harness import Harness, Run, percentiles, spread
from model_shapes import write_config
from random_adapters import write_adapter
from weft.checkpoint.adapters.plan import DENSE
from weft.checkpoint.adapters.projections import projections_of
from weft.checkpoint.config import ModelConfig
from weft.contract.give_way import HostPriority
from weft.engine.loop.build import MAX_SWITCH_S
from weft.engine.model.adapters.formats import read_adapter
from weft.engine.model.adapters.weights import host_weights

NUM_CALLS, REST_S = 60, 0.0044
RANK = 16
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")


def read(path: Path, model: ModelConfig) -> None:
    """Reads an adapter as a worker does, but into memory that is not page-locked."""
    with torch.inference_mode():
        adapter = read_adapter(path, model, max_rank=RANK, dtype=torch.bfloat16, parts={DENSE})
        parts = projections_of(model, PROJECTIONS)
        host_weights(
            adapter, parts, RANK, lambda name: None, vocab_size=model.vocab_size, for_gpu=False
        )


def measure(
    num_steps: int, paths: list[Path], model: ModelConfig, *, gives_way: bool
) -> tuple[list[float], list[float]]:
    """Milliseconds of each step on the host, seconds of each read; without paths none is read."""
    host, stop = HostPriority(), threading.Event()
    values, steps, reads = torch.zeros(8), list[float](), list[float]()

    def read_on() -> None:
        if gives_way:
            host.enter_thread()
        while not stop.is_set():
            began = time.perf_counter()
            read(paths[len(reads) % len(paths)], model)
            reads.append(time.perf_counter() - began)

    thread = threading.Thread(target=read_on)
    if paths:
        thread.start()
    for _ in range(num_steps):
        host.take_cores()
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            values.add_(1)
        steps.append(1e3 * (time.perf_counter() - began))
        host.yield_cores()
        time.sleep(REST_S)
    stop.set()
    if paths:
        thread.join()
    return steps, reads


harness = Harness(__file__, __doc__)
harness.flag("--steps", type=int, default=400)


@harness.part
def give_way(run: Run) -> None:
    """Steps with and without a reader beside them."""
    torch.set_num_threads(1)
    # As in an engine's process.
    sys.setswitchinterval(MAX_SWITCH_S)
    gc.collect()
    gc.freeze()
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    model_dir = write_config(folder, "llama-3.1-8b")
    model = ModelConfig.load(model_dir)
    paths = [write_adapter(folder / str(i), model_dir, RANK, i) for i in range(2)]
    read(paths[0], model)
    for name, given, gives_way in (
        ("none", [], False),
        ("read without giving way", paths, False),
        ("read", paths, True),
    ):
        steps, reads = measure(run.options.steps, given, model, gives_way=gives_way)
        of_reads = {"s_a_read": spread(reads)} if reads else {}
        run.row(percentiles(steps), table="ms of steps on the host", adapters=name, **of_reads)


if __name__ == "__main__":
    sys.exit(harness.main())
