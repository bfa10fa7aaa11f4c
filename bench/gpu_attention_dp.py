"""Speed of engines on several GPUs that share experts (`--attention-dp`), one on each.

    python bench/gpu_attention_dp.py [--model qwen3-30b-a3b] [--size 2] [--batches 64 256]

Each engine has a process, and an equal part of the requests of a batch. The row beside it, of ranks
that divide all of the model, is that of `gpu_ranks.py --only engine --tp 2 --ep 2`, whose prompts
and answers have the same lengths. Weights are made up on the devices. A step's time is the mean of
the engines, which wait for each other in each layer.

`--exchange` measures captured exchanges of rows alone, 32 in a graph: rows to their experts and
back, without experts, beside the bytes of these rows.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from clocks import event_s
from engine_runs import run_batch
from gpu_engine import GPU_SETTINGS
from gpu_ranks import NEW_TOKENS, PROMPT_TOKENS
from harness import Harness, Run
from model_shapes import LARGE_MODELS, MODELS, write_config
from weft.engine.loop.llm import LLM
from weft.engine.parallel.device_dispatch import DeviceDispatch
from weft.kernels.ops.moe.spec import Routing
from weft.kernels.ops.peers.triton_experts import return_rows, send_rows

LIMIT_S = 100.0
"""Longest wait for the next row of an engine."""
PER_GRAPH = 32
ROWS = (1, 8, 32, 128, 256, 1024, 4096)

harness = Harness(__file__, __doc__)
harness.flag("--model", choices=[*MODELS, *LARGE_MODELS], default="qwen3-30b-a3b")
harness.flag("--size", type=int, default=2, help="engines")
harness.flag("--batches", nargs="*", type=int, default=[64, 256], help="requests of all engines")
harness.flag("--layers", type=int, help="of a shorter model")
harness.flag("--exchange", action="store_true", help="also exchanges alone")
harness.flag("--same-device", action="store_true", help="all on the first GPU, to try it")


def engine(rank: int, options: Any, group: str, meeting: Any, done: Any, tells: Connection) -> None:
    """Measures as one engine; sends rows."""
    most = max(options.batches, default=64) // options.size
    changed = {} if options.layers is None else {"num_hidden_layers": options.layers}
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **GPU_SETTINGS,
            "device": f"cuda:{0 if options.same_device else rank}",
            "num_pages": 640 + most * (PROMPT_TOKENS + NEW_TOKENS) // 16,
            "max_running_requests": max(64, most),
            "rank_timeout_s": 60.0,
            "attention_dp": options.size,
            "attention_dp_rank": rank,
            "attention_dp_group": group,
        }
        began = time.perf_counter()
        with LLM(write_config(Path(folder), options.model, **changed), **settings) as llm:
            gc.collect()
            gc.freeze()
            free = torch.cuda.mem_get_info()[0] / 2**30
            tells.send({"start": {"s": time.perf_counter() - began, "free_gib": free}})
            num_runs = 0
            for batch in options.batches:
                for length, tokens in ((32, 8), (PROMPT_TOKENS, NEW_TOKENS)):
                    meeting.wait(LIMIT_S)
                    run = run_batch(llm, batch // options.size, length, tokens)
                    num_runs += 1
                    with done.get_lock():
                        done.value += 1
                    while done.value < num_runs * options.size:
                        llm.engine.turn()  # Others need this engine's experts.
                row = {"step_ms": 1e3 * run.seconds / run.num_steps}
                row["host_ms"] = 1e3 * statistics.median(run.host_s)
                row["first_token_ms"] = 1e3 * run.first_token_s
                tells.send({str(batch): row | llm.engine.counters()})
            if options.exchange:
                tells.send({"exchange": exchanges(llm, meeting)})
            meeting.wait(LIMIT_S)


def exchanges(llm: LLM, meeting: Any) -> dict[int, dict[str, float]]:
    """Microseconds of an exchange of so many rows of each engine, and bytes of rows that it sends
    to another one.
    """
    lockstep = llm.engine.parts.lockstep
    assert lockstep is not None
    assert isinstance(lockstep.dispatch, DeviceDispatch)
    memory = lockstep.dispatch.memory
    assert memory is not None
    shape, device, found = memory.shape, memory.own.device, dict[int, dict[str, float]]()
    for rows in ROWS:
        if rows > shape.rows:
            continue
        numbers = torch.rand(rows, shape.experts * memory.size, device=device)
        ids = numbers.topk(shape.top_k).indices.sort().values.int()
        routing = Routing(ids, torch.rand(rows, shape.top_k, device=device))
        x = torch.randn(rows, shape.width, device=device).to(shape.dtype)

        def once(x: torch.Tensor = x, routing: Routing = routing, rows: int = rows) -> None:
            sent, _ = send_rows(memory, x, routing, rows)
            return_rows(memory, sent, routing.ids, x, rows)

        once()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(PER_GRAPH):
                once()
        times = []
        for _ in range(6):
            meeting.wait(LIMIT_S)
            graph.replay()
            times.append(1e6 * event_s(lambda graph=graph: [graph.replay() for _ in range(3)]))
        us = min(times[1:]) / (3 * PER_GRAPH)
        found[rows] = {"us": us, "mib": rows * shape.width * shape.dtype.itemsize / 2**20}
    return found


@harness.part
def engines(run: Run) -> None:
    """One model whose experts several engines share."""
    options = run.options
    context = multiprocessing.get_context("spawn")
    meeting, done = context.Barrier(options.size), context.Value("i", 0)
    group = f"bench-{random.randrange(1 << 40):x}"
    started, hears = [], []
    for rank in range(options.size):
        hear, tell = context.Pipe(duplex=False)
        given = rank, options, group, meeting, done, tell
        started.append(context.Process(target=engine, args=given))
        hears.append(hear)
        started[-1].start()
        tell.close()
    try:
        kinds = ["start", *map(str, options.batches), *(["exchange"] if options.exchange else [])]
        for kind in kinds:
            rows = []
            for hear in hears:
                if not hear.poll(LIMIT_S):
                    raise TimeoutError(f"{kind}: an engine has told nothing for {LIMIT_S:g} s")
                rows.append(hear.recv()[kind])
            if kind == "exchange":
                for count in rows[0]:
                    slowest = max(row[count]["us"] for row in rows)
                    run.row(rows[0][count] | {"us": slowest}, table="exchange", rows=count)
                continue
            mean = {name: statistics.mean(row[name] for row in rows) for name in rows[0]}
            if kind != "start":
                mean["tok_s"] = 1e3 * int(kind) / mean["step_ms"]
            run.row(mean, table="start" if kind == "start" else "decode", batch=kind)
    finally:
        for one in started:
            one.join(5)
            one.kill()


if __name__ == "__main__":
    sys.exit(harness.main())
