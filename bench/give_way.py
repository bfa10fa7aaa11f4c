"""The cost of a thread that reads adapters for the engine thread of a GPU worker.

    python bench/give_way.py [--steps 400]

A thread in place of the engine's calls torch some dozens of times, like a step on the host, and
then rests as if for the device. Beside it adapters of Llama-3.1-8B's shape are read all the time:
with and without giving way
(`weft.contract.give_way`), and not at all.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from model_shapes import write_config
from random_adapters import write_adapter
from rich.console import Console
from rich.table import Table
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
        host.begin()
        began = time.perf_counter()
        for _ in range(NUM_CALLS):
            values.add_(1)
        steps.append(1e3 * (time.perf_counter() - began))
        host.end()
        time.sleep(REST_S)
    stop.set()
    if paths:
        thread.join()
    return steps, reads


def main() -> int:
    """Runs the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    # As in an engine's process.
    sys.setswitchinterval(MAX_SWITCH_S)
    gc.collect()
    gc.freeze()
    table = Table("adapters", "p50 ms", "p90 ms", "p99 ms", "a read, s", title="Host time of steps")
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), "llama-3.1-8b")
        model = ModelConfig.load(model_dir)
        paths = [write_adapter(Path(folder) / str(i), model_dir, RANK, i) for i in range(2)]
        read(paths[0], model)
        for name, given, gives_way in (
            ("none", [], False),
            ("read without giving way", paths, False),
            ("read", paths, True),
        ):
            steps, reads = measure(arguments.steps, given, model, gives_way=gives_way)
            shares = (f"{value:.2f}" for value in np.percentile(steps, (50, 90, 99)))
            table.add_row(name, *shares, f"{statistics.median(reads):.2f}" if reads else "")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
