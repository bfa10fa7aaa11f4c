"""Decode steps and prompt chunks side by side on two parts of a GPU, beside steps that mix them.

    python bench/sm_partition.py [--model llama-3.1-8b] [--batch 64] [--parts 40 64 96]

`mixed` is an engine as it is: a batch decodes while prompts come, and each step takes a chunk of
so many of their rows. `parts` gives the decode graph of the batch some of the multiprocessors, by a
CUDA green context, and the rest to a second engine of the same model that computes prompts without
graphs. There the graph is replayed without a scheduler between, so its figures are an upper bound.

A row tells prompt tokens per second while the batch decodes, and the times between its tokens, over
those of the batch alone on the whole GPU.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from clocks import release
from engine_runs import GREEDY, random_prompts, run_batch
from gpu_engine import GPU_SETTINGS, PROMPT_TOKENS
from harness import Harness, Run, percentile
from model_shapes import MODELS, write_config
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.submits import Submit
from weft.engine.executor.graphs import GraphBucket
from weft.engine.loop.llm import LLM
from weft.kernels.ops.greedy import greedy_rows
from weft.kernels.shared import multiprocessors

NEXT_TOKENS = 512
"""Of each prompt that comes while the batch decodes."""
STEPS = 250
"""Of the batch while prompts come to the same engine, at most."""

harness = Harness(__file__, __doc__)
harness.flag("--model", choices=MODELS, default="llama-3.1-8b")
harness.flag("--batch", type=int, default=64, help="decodes")
harness.flag("--prompts", type=int, default=64, help=f"of {NEXT_TOKENS} tokens beside them")
harness.flag("--parts", type=int, nargs="+", default=[40, 64, 96], help="of the decodes")
harness.flag("--chunks", type=int, nargs="+", default=[32, 64, 128, 256], help="rows, of mixed")


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of the driver returned. Raises RuntimeError if it failed."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"the driver answered {code}")
    return values[0] if len(values) == 1 else values


def streams_of(num_sms: int) -> tuple[list[torch.cuda.Stream], list[int]]:
    """Streams of two green contexts, one of at least `num_sms` multiprocessors and one of the rest,
    and how many each has.
    """
    from cuda.bindings import driver

    torch.cuda.init()
    torch.cuda.current_stream()
    device = checked(driver.cuDeviceGet(0))
    kind = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    whole = checked(driver.cuDeviceGetDevResource(device, kind))
    groups, _, rest = checked(driver.cuDevSmResourceSplitByCount(1, whole, 0, num_sms))
    streams, sizes = list[torch.cuda.Stream](), list[int]()
    for part in (groups[0], rest):
        described = checked(driver.cuDevResourceGenerateDesc([part], 1))
        flags = driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        context = checked(driver.cuGreenCtxCreate(described, device, flags))
        lasting = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = checked(driver.cuGreenCtxStreamCreate(context, lasting, 0))
        streams.append(torch.cuda.ExternalStream(int(stream)))
        sizes.append(part.sm.smCount)
    return streams, sizes


@contextmanager
def on_part(stream: torch.cuda.Stream, num_sms: int) -> Iterator[None]:
    """Captures and launches in a part of the GPU; grids are sized for its multiprocessors."""
    properties = torch.cuda.get_device_properties
    captures = torch.cuda.graph.default_capture_stream
    multiprocessors.num_multiprocessors.cache_clear()
    torch.cuda.get_device_properties = lambda *_: _Part(properties(0), num_sms)  # type: ignore[assignment, misc]
    torch.cuda.graph.default_capture_stream = stream
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        torch.cuda.get_device_properties = properties
        torch.cuda.graph.default_capture_stream = captures
        multiprocessors.num_multiprocessors.cache_clear()


class _Part(SimpleNamespace):
    """A GPU's properties with fewer multiprocessors."""

    def __init__(self, whole: Any, num_sms: int) -> None:
        names = [name for name in dir(whole) if not name.startswith("_")]
        super().__init__(**{name: getattr(whole, name) for name in names})
        self.multi_processor_count = num_sms


def settings_of(options: Any, **changed: Any) -> dict[str, Any]:
    pages = (options.batch * 1024 + options.prompts * NEXT_TOKENS) // 16 + 256
    return GPU_SETTINGS | {"num_pages": pages, "max_running_requests": 256} | changed


def replays(llm: LLM, batch: int, goes_on: Any) -> list[float]:
    """Milliseconds between ends of the batch's decode graph, replayed while `goes_on()`."""
    executor = llm.engine.parts.local
    known, inputs, times = executor.known.tokens, executor.inputs, list[float]()
    assert executor.graphs is not None
    assert inputs is not None
    graph, hidden = executor.graphs._graphs[GraphBucket(batch, batch, "decode")]

    @torch.inference_mode()
    def repeat_step(step: int) -> None:
        if step != 8:
            return
        assert inputs.step is not None
        drawn = known.clone()
        known[0, inputs.drawing_slots] = inputs.step.token_ids
        ends = list[torch.cuda.Event]()
        while goes_on() or len(ends) < 30:
            graph.replay()
            greedy_rows(executor._model.logits(hidden))
            ends.append(torch.cuda.Event(enable_timing=True))
            ends[-1].record()
            if len(ends) > 2:
                ends[-3].synchronize()
        known.copy_(drawn)
        torch.cuda.synchronize()
        times.extend(a.elapsed_time(b) for a, b in itertools.pairwise(ends))

    run_batch(llm, batch, PROMPT_TOKENS, 64, repeat_step)
    return times


def alone(llm: LLM, batch: int) -> float:
    """Milliseconds of a decode step by itself."""
    until = time.perf_counter() + 0.5
    return statistics.median(replays(llm, batch, lambda: time.perf_counter() < until))


def row_of(way: str, alone_ms: float, times: list[float], tokens: int, seconds: float) -> dict:
    p50, p99 = (percentile(times, share) / alone_ms for share in (0.5, 0.99))
    rate = tokens / seconds
    return {"way": way, "prompt tokens/s": rate, "gap p50 / alone": p50, "gap p99 / alone": p99}


def mixed_row(llm: LLM, options: Any, chunk: int) -> dict[str, Any]:
    """A batch that decodes while prompts come to the same engine, for `STEPS` steps."""
    engine, batch = llm.engine, options.batch
    scheduler = engine.scheduler

    def submits(first: int, count: int, length: int, new: int) -> Inbox:
        stop = StopCriteria(max_tokens=new, ignore_eos=True)
        prompts = random_prompts(engine.info.vocab_size, count, length)
        return Inbox(
            submits=[
                Submit(
                    gateway=1,
                    request_id=str(first + index),
                    attempt=1,
                    prompt=prompt,
                    sampling=GREEDY,
                    stop=stop,
                )
                for index, prompt in enumerate(prompts)
            ]
        )

    scheduler._prompt_budget = None
    without = run_batch(llm, batch, PROMPT_TOKENS, STEPS)
    alone_ms = 1e3 * without.seconds / without.num_steps
    inbox: Inbox | None = submits(0, batch, PROMPT_TOKENS, STEPS + 50)
    num_done, ends, started = 0, list[float](), set[str]()
    num_started = 0
    while num_done < batch + options.prompts:
        outbox = engine.turn(inbox)
        inbox = None
        has_decoded = False
        for session in outbox.gateways:
            assert not session.failed, session.failed
            num_done += len(session.finished)
            for tokens in session.all_tokens():
                started.add(tokens.request_id)
                has_decoded |= int(tokens.request_id) < batch
        if len(started) == batch and not ends:
            scheduler._prompt_budget = lambda *_, **__: chunk
            inbox = submits(batch, options.prompts, NEXT_TOKENS, 1)
            ends.append(time.perf_counter())
        elif ends and has_decoded and num_started < options.prompts and len(ends) < STEPS:
            ends.append(time.perf_counter())
            num_started = len(started) - batch
            if num_started == options.prompts or len(ends) == STEPS:
                scheduler._prompt_budget = None
    times = [1e3 * (after - before) for before, after in itertools.pairwise(ends)]
    what = f"mixed, {chunk} rows of prompts a step"
    return row_of(what, alone_ms, times, num_started * NEXT_TOKENS, ends[-1] - ends[0])


def split_row(model: Path, options: Any, num_sms: int, alone_ms: float) -> dict[str, Any]:
    """Decodes on one part of the GPU, prompts on the other."""
    (first, second), (num_first, num_second) = streams_of(num_sms)
    prompts = {"max_step_tokens": 2048, "prefill_chunk_tokens": 2048, "cuda_graphs": False}
    with on_part(first, num_first):
        decodes = LLM(model, **settings_of(options))
    with on_part(second, num_second):
        fills = LLM(model, **settings_of(options, **prompts))
        run_batch(fills, 8, NEXT_TOKENS, 1)
    seconds = list[float]()
    ready, begin = threading.Event(), threading.Event()

    def fill() -> None:
        ready.set()
        begin.wait()
        with on_part(second, num_second):
            seconds.append(run_batch(fills, options.prompts, NEXT_TOKENS, 1).all_seconds)

    filler = threading.Thread(target=fill)
    filler.start()
    ready.wait()

    def goes_on() -> bool:
        begin.set()
        return filler.is_alive()

    with torch.cuda.stream(first):
        by_itself = alone(decodes, options.batch)
        times = replays(decodes, options.batch, goes_on)
    filler.join()
    fills.close()
    decodes.close()
    what = f"parts of {num_first} and {num_second}"
    tokens = options.prompts * NEXT_TOKENS
    row = row_of(what, alone_ms, times, tokens, seconds[0])
    return row | {"gap without prompts / alone": by_itself / alone_ms}


@harness.part
def partition(run: Run) -> None:
    """Mixed steps, then each split."""
    options = run.options
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(Path(folder), options.model)
        with LLM(model, **settings_of(options)) as llm:
            alone_ms = alone(llm, options.batch)
            run.note(f"{options.batch} decodes alone: {alone_ms:.2f} ms a step")
            for chunk in options.chunks:
                mixed_row(llm, options, chunk)  # Compiles and captures.
                run.row(mixed_row(llm, options, chunk), table="beside prompts")
        del llm
        release()
        for num_sms in options.parts:
            with run.noted(f"{num_sms} multiprocessors"):
                run.row(split_row(model, options, num_sms, alone_ms), table="beside prompts")
            release()


if __name__ == "__main__":
    sys.exit(harness.main())
