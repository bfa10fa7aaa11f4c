"""Speed of engines on one GPU and on several, beside one another, and of sums over ranks.

    python bench/gpu_ranks.py sums [--ranks 2 4] [--out DIR]
    python bench/gpu_ranks.py engine --model llama-3.1-8b --tp 2 [--ep 2] [--parts] [--out DIR]

Weights are made up on the devices, in the models' real shapes. The roof of a decode step is the
time to read its weights and KV once, divided among the cards, at their nominal 3.35 TB/s (H200:
4.8); that of a prompt the time to multiply at the nominal 989 TFLOP/s a card. Every call writes one
JSON. Several calls may load beside each other: with `--gate DIR --calls N` each measures once all N
are loaded and those of lower `--turn` have measured. Of those that load beside each other on one
card at most one may have ranks: processes take a card in turns, and a sum then waits for the turns
of all ranks.

`--long 128` adds a decode step of 128 requests with some 1,500 tokens behind each, as in the middle
of answers of 1,024 to prompts of 1,024, and from it and the rate of prompts their output tokens a
second and card.

`--parts` adds where a step's time goes. On the device a kernel counts from the end of what ran
before it, so that kernels which start early do not count their wait for others, and all times add
up to the step's; a sum contains the wait for the other ranks. On the host it times the calls that
are known to take long, and those that ranks add.

`--quick` runs every kind of step but a few times, which fills caches of compiled kernels; ranks may
then share a card, as in `--device cuda:0,cuda:0 --layers 2`.

`sums` measures captured sums of bfloat16 rows of 4,096 numbers over ranks, 64 in a graph: this
project's (with residual and norm, in one and in two exchanges), torch's symmetric memory and NCCL
(the sum alone); all ranks must get the same bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from gpu_engine import random_prompts, run_batch, run_requests
from gpu_roof import IN_BFLOAT16, Rates, WeightBytes, decode_work, prompt_work
from gpu_setup import describe_gpu
from model_shapes import LARGE_MODELS, MODELS, write_config
from torch.autograd import DeviceType
from torch.distributed import _symmetric_memory as symmetric
from torch.profiler import ProfilerActivity, profile
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.quantization import resolve_quantization
from weft.contract.request import SamplingParams
from weft.engine.executor.ranks import ranked
from weft.engine.loop.llm import LLM
from weft.engine.parallel import device_peers
from weft.engine.parallel.segment import Segment
from weft.engine.parallel.shared import SharedGroup, segment_bytes
from weft.kernels.gpu.norm import add_rms_norm
from weft.kernels.norm import Norm

CARD, H200 = Rates(3.35e12, 989e12), Rates(4.8e12, 989e12)
PROMPT_TOKENS, NEW_TOKENS = 256, 96
LONG_TOKENS, ANSWER_TOKENS = 1_408, 1_024
STEP_TOKENS = 8_192
"""Most tokens of a step."""
TRACED_STEPS = 10
WIDTH, PER_GRAPH = 4096, 64
SUM_KIB = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SUM_LIMIT_S = 60.0
"""Longest wait for the next figure of sums."""
KINDS = {
    "sums over ranks": ("_sum_kernel", "nccl"),
    "tokens to ranks": ("_share_kernel",),
    "attention": ("attention", "attend", "_decode_kernel", "_merge", "flash", "latent"),
    "drawing": ("greedy", "draw", "sampl", "keep_tokens", "_largest", "_gather_kernel"),
    "experts": ("_direct_", "_sorted_", "_route_", "_count_", "_few_kernel", "moe"),
    "products": ("gemm", "nvjet", "cutlass", "linear", "product", "matmul", "tile", "_mm", "fp8"),
}
"""Kinds of kernels by parts of their names; the first that fits."""


HOST_CALLS: dict[str, tuple[Any, str]] = {
    "graphs launched": (torch.cuda.CUDAGraph, "replay"),
    "frames made": (ranked, "encode_step"),
    "pages told": (ranked.RankedExecutor, "_new_pages"),
    "frames posted": (SharedGroup, "post"),
}
"""Calls of a step on the host by what they do: where each is looked up."""


class Gate(NamedTuple):
    """By which calls that load beside each other measure one after another."""

    folder: Path
    """Has files loaded-TURN-NAME and done-TURN-NAME."""
    calls: int
    turn: int
    limit_s: float
    """Longest wait for others that load."""

    def wait(self) -> None:
        """Waits for this call's turn."""
        (self.folder / f"loaded-{self.turn}-{os.getpid()}").touch()
        until = time.monotonic() + self.limit_s
        while len(self._marks("loaded")) < self.calls and time.monotonic() < until:
            time.sleep(0.05)
        # One that has not loaded by now does not measure before this one.
        before = {mark for mark in self._marks("loaded") if int(mark.split("-")[0]) < self.turn}
        while not before <= self._marks("done"):
            time.sleep(0.05)

    def leave(self) -> None:
        """Gives the turn to the next call."""
        (self.folder / f"done-{self.turn}-{os.getpid()}").touch()

    def _marks(self, kind: str) -> set[str]:
        return {one.name.removeprefix(f"{kind}-") for one in self.folder.glob(f"{kind}-*")}


class Case(NamedTuple):
    """What `engine` measures."""

    name: str
    tp: int
    ep: int
    batches: Sequence[int]
    long: int
    """Requests of the step of long ones; 0: none."""
    has_parts: bool
    quantization: str
    prompts: int
    """Prompts of 4,096 tokens beside each other; 0: no prompts are measured."""
    is_quick: bool
    device: str
    gate: Gate | None
    changed: dict[str, Any]
    """Fields of the model's configuration."""


def weight_bytes(config: ModelConfig, quantization: str) -> WeightBytes:
    """Sizes of numbers in a model's weights."""
    chosen = resolve_quantization(quantization, config.quantization)
    match None if chosen is None else chosen.format:
        case "fp8" | "int8":
            return WeightBytes(1, 1)
        case "int4":
            return WeightBytes(0.5 + 2 / 32, 0.5 + 2 / 32)
        case "mxfp4":
            return WeightBytes(2, 0.5 + 1 / 32)
    return IN_BFLOAT16


def pages_of(case: Case) -> int:
    """Pages of 16 tokens that the largest batch and the prompts take, and some more."""
    prompts = case.prompts * 4_096 // 16
    rows = max(case.batches, default=0) * (PROMPT_TOKENS + NEW_TOKENS) // 16
    long = case.long * (LONG_TOKENS + long_new_tokens(case.long)) // 16
    pages = 640 + max(prompts, rows, long) // 16 * 16
    return min(pages, 2_048) if case.is_quick else pages


def long_new_tokens(requests: int) -> int:
    """New tokens of each long request, so that all requests decode together for NEW_TOKENS steps:
    the first request also generates while the other prompts are computed, which takes up to
    2 * requests * LONG_TOKENS / STEP_TOKENS steps.
    """
    return NEW_TOKENS + 2 * requests * LONG_TOKENS // STEP_TOKENS


def engine_case(case: Case, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measures one model on some GPUs; gives all that is known to `keep` after each row."""
    name, tp, ep = case.name, case.tp, case.ep
    began = time.perf_counter()
    found: dict[str, Any] = {"model": name, "tp": tp, "ep": ep, "quantization": case.quantization}
    found |= {"decode": {}, "ttft_ms": {}, "parts": {}, "host_us": {}}
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), name, **case.changed)
        config = ModelConfig.load(model_dir)
        settings: dict[str, Any] = {
            "device": case.device,
            "dtype": "bfloat16",
            "dummy_weights": True,
            "num_pages": pages_of(case),
            "max_context_tokens": 8_448,
            "max_running_requests": max(64, case.long, *case.batches),
            "max_step_tokens": STEP_TOKENS,
            "prefill_chunk_tokens": 4096,
            "prefix_cache": False,
            "inter_token_target_s": 1.0,
            "rank_timeout_s": 60.0,
            "quantization": case.quantization,
        }
        sizes = weight_bytes(config, case.quantization)
        with LLM(model_dir, **settings, tp=tp, ep=ep) as llm:
            gc.collect()
            gc.freeze()
            found["start_s"] = time.perf_counter() - began
            free = torch.cuda.mem_get_info()[0] / 2**30
            print(
                f"{name} tp {tp} ep {ep}: started in {found['start_s']:.0f} s, {free:.1f} GiB free",
                flush=True,
            )
            if case.gate is not None:
                case.gate.wait()
            measuring = time.perf_counter()
            card = H200 if "H200" in torch.cuda.get_device_name() else CARD
            rates = Rates(card.bytes_per_s * tp, card.flop_per_s * tp)
            for batch in case.batches:
                found["decode"][batch] = decode(
                    llm, config, batch, PROMPT_TOKENS, rates, sizes, case.is_quick
                )
                if case.has_parts and not case.is_quick:
                    found["parts"][batch] = parts_of_step(llm, batch)
                    found["host_us"][batch] = host_parts(llm, batch)
                keep(found)
            if case.prompts:
                prompts(llm, config, case, rates, found)
                if case.has_parts and not case.is_quick:
                    found["parts"]["prompts"] = parts_of_prompts(llm, case.prompts)
                keep(found)
            if case.long and not case.is_quick:
                long_answers(llm, config, case, rates, sizes, found)
            keep(found)
            print(f"  measured in {time.perf_counter() - measuring:.0f} s", flush=True)


def decode(
    llm: LLM,
    config: ModelConfig,
    batch: int,
    prompt_tokens: int,
    rates: Rates,
    sizes: WeightBytes,
    is_quick: bool,
    new_tokens: int = NEW_TOKENS,
) -> dict[str, float]:
    """Steady decode at one batch size behind prompts of one length, the better of two runs."""
    run_batch(llm, batch, 32, 8)
    if is_quick:
        run_batch(llm, min(batch, 64), prompt_tokens, 4)
        return {}
    tries = 2 if batch < 128 else 1
    runs = [run_batch(llm, batch, prompt_tokens, new_tokens) for _ in range(tries)]
    run = min(runs, key=lambda run: run.seconds / run.num_steps)
    step_s = run.seconds / run.num_steps
    context = prompt_tokens + new_tokens - run.num_steps / 2
    roof_s = decode_work(config, batch, context, sizes).seconds(rates)
    host_s = sorted(second for run in runs for second in run.host_s)
    host_ms, host_p10_ms = (1e3 * host_s[len(host_s) * part // 10] for part in (5, 1))
    row = {"step_ms": 1e3 * step_s, "tok_s": batch / step_s, "share": roof_s / step_s}
    row |= {"host_ms": host_ms, "host_p10_ms": host_p10_ms, "roof_ms": 1e3 * roof_s}
    print(
        f"  batch {batch:4}: {row['step_ms']:7.3f} ms a step, {row['tok_s']:8.0f} tok/s, "
        f"{row['share']:5.1%} of {row['roof_ms']:.3f} ms, host {host_ms:.2f} ms, a tenth "
        f"below {host_p10_ms:.2f}",
        flush=True,
    )
    return row


def prompts(llm: LLM, config: ModelConfig, case: Case, rates: Rates, found: dict[str, Any]) -> None:
    """First tokens of lone prompts, and the rate of prompts beside each other."""
    if case.is_quick:
        for batch, length in ((1, 2048), (1, 8192), (2, 4096)):
            run_batch(llm, batch, length, 2)
        return
    for length in (2048, 8192):
        times = [run_batch(llm, 1, length, 2).first_token_s for _ in range(4)]
        ms, roof = 1e3 * statistics.median(times[1:]), prompt_work(config, [length]).seconds(rates)
        all_ms = [1e3 * seconds for seconds in times]
        found["ttft_ms"][length] = {"ms": ms, "share": 1e3 * roof / ms, "all_ms": all_ms}
        each = ", ".join(f"{one:.0f}" for one in all_ms)
        print(f"  first token of {length}: {ms:.1f} ms ({each}), {1e3 * roof / ms:.1%} of the roof")
    count = case.prompts
    times = [run_batch(llm, count, 4096, 2).first_token_s for _ in range(2)]
    rate = count * 4096 / min(times)
    share = prompt_work(config, [4096] * count).seconds(rates) / min(times)
    found["prefill"] = {"prompts": count, "tok_s": rate, "share": share}
    print(f"  prefill {count} x 4,096: {rate:,.0f} tok/s, {share:.1%} of the roof", flush=True)


def long_answers(
    llm: LLM,
    config: ModelConfig,
    case: Case,
    rates: Rates,
    sizes: WeightBytes,
    found: dict[str, Any],
) -> None:
    """Output tokens a second and card of prompts and answers of 1,024 tokens, by arithmetic."""
    new_tokens = long_new_tokens(case.long)
    row = decode(
        llm, config, case.long, LONG_TOKENS, rates, sizes, is_quick=False, new_tokens=new_tokens
    )
    answer_s = ANSWER_TOKENS * row["step_ms"] / 1e3 / case.long
    prompt_s = ANSWER_TOKENS / found["prefill"]["tok_s"] if case.prompts else 0.0
    rate = ANSWER_TOKENS / (answer_s + prompt_s) / case.tp
    found["long"] = {**row, "requests": case.long, "tok_s_card": rate}
    print(f"  1,024 to 1,024, {case.long} requests: {rate:,.0f} output tok/s a card", flush=True)


def parts_of_step(llm: LLM, batch: int) -> dict[str, float]:
    """Microseconds of a decode step by kind of kernel, on rank 0, and in none."""
    traces: list[profile] = []

    def watch(step: int) -> None:
        if step == 8:
            torch.cuda.synchronize()
            traces.append(profile(activities=[ProfilerActivity.CUDA]))
            traces[0].start()
        elif step == 8 + TRACED_STEPS:
            torch.cuda.synchronize()
            traces[0].stop()

    given = random_prompts(llm.engine.info.vocab_size, batch, PROMPT_TOKENS)
    run_requests(llm, given, [40] * batch, SamplingParams(temperature=0.0), watch)
    spans = spans_of(traces[0])
    count = len(spans) // TRACED_STEPS
    steps = [parts_of(spans[at : at + count]) for at in range(0, count * TRACED_STEPS, count)]
    names = {name for step in steps for name in step}
    # The median, since the other ranks wait for this one in the first and the last traced step.
    times = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in names}
    found = {name: us for name, us in times.items() if not name.startswith("_: ")}
    launches = Counter(name[:34] for *_, name in spans)
    single = {
        f"{launches[name] / TRACED_STEPS:.0f} {name}": times[f"_: {name}"] for name in launches
    }
    print(f"  us of a step at batch {batch}: {listed(found, 9)}, kernels {count}")
    print(f"    {listed(single, 14)}", flush=True)
    return {**found, "kernels": count}


def parts_of_prompts(llm: LLM, count: int) -> dict[str, float]:
    """Microseconds of STEP_TOKENS tokens of prompts by kind of kernel, on rank 0, and in none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run_batch(llm, count, 4_096, 2)
        torch.cuda.synchronize()
    steps = count * 4_096 / STEP_TOKENS
    times = {name: us / steps for name, us in parts_of(spans_of(trace)).items()}
    found = {name: us for name, us in times.items() if not name.startswith("_: ")}
    single = {name[3:]: us for name, us in times.items() if name.startswith("_: ")}
    print(f"  us of {STEP_TOKENS:,} tokens of prompts: {listed(found, 9)}")
    print(f"    {listed(single, 16)}", flush=True)
    return found


def spans_of(trace: profile) -> list[tuple[float, float, str]]:
    """When kernels began and ended, in microseconds, and their names."""
    return sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in trace.events() or ()
        if event.device_type == DeviceType.CUDA and event.time_range.end > 0
    )


def parts_of(spans: Sequence[tuple[float, float, str]]) -> dict[str, float]:
    """Microseconds of one step by kind of kernel, in none, and, behind `_: `, by kernel; each from
    the end of those that began before it.
    """
    times: defaultdict[str, float] = defaultdict(float)
    busy, until = 0.0, 0.0
    for start, end, name in spans:
        lowered = name.lower()
        fits = (kind for kind, names in KINDS.items() if any(part in lowered for part in names))
        alone = max(0.0, end - max(start, until))
        times[next(fits, "others")] += alone
        times[f"_: {name[:34]}"] += alone
        busy += alone
        until = max(until, end)
    times["gaps"] = until - spans[0][0] - busy
    return times


def host_parts(llm: LLM, batch: int) -> dict[str, float]:
    """Mean microseconds of a decode step on the host of rank 0 by call, and of the rest."""
    times: defaultdict[str, float] = defaultdict(float)
    count, known = 0, dict[str, float]()

    def note(step: int) -> None:
        nonlocal count, known
        if step == 1:
            times.clear()
        count, known = step - 1, dict(times)

    with ExitStack() as stack:
        for what, (owner, name) in HOST_CALLS.items():
            call = timed(getattr(owner, name), what, times)
            stack.enter_context(mock.patch.object(owner, name, call))
        run = run_batch(llm, batch, PROMPT_TOKENS, NEW_TOKENS, note)
    found = {what: 1e6 * seconds / count for what, seconds in known.items()}
    found["rest"] = 1e6 * statistics.mean(run.host_s[1:]) - sum(found.values())
    print(f"  us of a step on the host: {listed(found, 9)}", flush=True)
    return found


def timed(
    call: Callable[..., Any], what: str, times: defaultdict[str, float]
) -> Callable[..., Any]:
    """The call, whose seconds are added to `times`."""

    def run(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times[what] += time.perf_counter() - began

    return run


def listed(times: dict[str, float], count: int) -> str:
    """The longest times, in words."""
    most = sorted(times.items(), key=lambda entry: -entry[1])[:count]
    return ", ".join(f"{name} {us:.0f}" for name, us in most)


def sums(sizes: Sequence[int]) -> dict[str, Any]:
    """Microseconds of a sum by number of ranks, way and KiB, as far as ranks have come."""
    found: dict[str, Any] = {}
    context = multiprocessing.get_context("fork")
    for size in sizes:
        table = found[str(size)] = defaultdict[str, dict[int, float]](dict)
        told, tells = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as folder:
            segment = Segment.create(segment_bytes(size), "bench")
            ranks = [
                context.Process(target=sums_of_rank, args=(segment, rank, size, folder, tells))
                for rank in range(size)
            ]
            for rank in ranks:
                rank.start()
            ends = [rank.sentinel for rank in ranks]
            # The ranks end together once all is told, or one of them ends early.
            while told in wait([told, *ends], SUM_LIMIT_S):
                way, kib, us = told.recv()
                table[way][kib] = us
            for rank in ranks:
                rank.kill()
                rank.join()
        print(f"{size} ranks, us   " + " ".join(f"{kib:>6}" for kib in SUM_KIB), " KiB")
        for way, row in table.items():
            cells = (f"{row[kib]:6.1f}" if kib in row else "     -" for kib in SUM_KIB)
            print(f"{way:24}" + " ".join(cells), flush=True)
    return found


def sums_of_rank(
    segment: Segment, rank: int, size: int, folder: str, tells: Connection[Any, Any]
) -> None:
    """One rank of `sums`."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = f"file://{folder}/group"
    # Ranks tell one another where they are through memory of the host.
    backends = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backends, init_method=store, rank=rank, world_size=size, device_id=device
    )
    world = dist.group.WORLD
    assert world is not None
    peers = []
    for once in (16 << 20, 1):
        device_peers._ONCE_BYTES = dict.fromkeys((2, 4, 8), once)
        group = SharedGroup(segment, rank, size, 30.0)
        sizes = WIDTH, torch.bfloat16, 128  # A vocabulary, of no use here.
        peers.append(device_peers.DevicePeers(group, device, world, *sizes, lambda phase: None))
        torch.cuda.cudart().cudaHostUnregister(group.words[0])
        peers[-1]._memory.control.zero_()
    ours = dict(zip(("ours once", "ours twice"), peers, strict=True))
    for kib in SUM_KIB:
        ways = our_ways(ours, kib, device, world) | other_ways(kib, device, world)
        for way, call in ways.items():
            try:
                us = graph_us(call)
            except RuntimeError as error:
                if rank == 0:
                    print(f"{way}, {kib} KiB: {error}"[:300], flush=True)
                continue
            if rank == 0:
                tells.send((way, kib, us))
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


def our_ways(
    peers: dict[str, device_peers.DevicePeers],
    kib: int,
    device: torch.device,
    world: dist.ProcessGroup,
) -> dict[str, Callable[[], Any]]:
    """This project's sums with norms, once their results are found to be right."""
    norm = Norm(torch.ones(WIDTH, dtype=torch.bfloat16, device=device), 1e-5)
    part, stream = rows_of_sum(kib, device, world)
    exact = part.float()
    dist.all_reduce(exact)
    exact += stream.float()
    ways: dict[str, Callable[[], Any]] = {}
    for way, one in peers.items():
        given = stream.clone()
        one.add_norm(part, given, norm)
        copies = [torch.empty_like(given) for _ in range(world.size())]
        dist.all_gather(copies, given)
        assert all(torch.equal(copy, given) for copy in copies), f"{way}: other bits"
        assert (given.float() - exact).abs().max() < 0.1, f"{way}: other sums"
        ways[f"{way}, norm"] = partial(one.add_norm, part, stream, norm)
    return ways


def other_ways(
    kib: int, device: torch.device, world: dist.ProcessGroup
) -> dict[str, Callable[[], Any]]:
    """NCCL's sums and those of torch's symmetric memory."""
    norm = Norm(torch.ones(WIDTH, dtype=torch.bfloat16, device=device), 1e-5)
    part, stream = rows_of_sum(kib, device, world)
    shared = symmetric.empty(*part.shape, dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, world)
    out, name = torch.empty_like(part), world.group_name
    return {
        "NCCL": lambda: dist.all_reduce(part),
        "NCCL, norm": lambda: (dist.all_reduce(part), add_rms_norm(part, stream, *norm)),
        "symm_mem one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce_out(
            shared, "sum", name, out
        ),
        "symm_mem two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name),
    }


def rows_of_sum(
    kib: int, device: torch.device, world: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, WIDTH]: a part of this rank's own, and a stream that all ranks have alike."""
    shape = (kib << 10) // (2 * WIDTH), WIDTH
    made = []
    for seed in (world.rank(), 77):
        torch.manual_seed(seed)
        made.append(torch.randn(shape, dtype=torch.bfloat16, device=device))
    return made[0], made[1]


def graph_us(call: Callable[[], Any]) -> float:
    """Microseconds of an operation, `PER_GRAPH` of which are captured; the least of 5 replays."""
    for _ in range(2):
        call()
    dist.barrier()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(PER_GRAPH):
            call()
    times = []
    for _ in range(6):
        dist.barrier()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        begin.record()
        for _ in range(3):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (3 * PER_GRAPH))
    return min(times[1:])


def main() -> None:
    """Measures one thing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("sums", "engine"))
    parser.add_argument("--model", choices=[*MODELS, *LARGE_MODELS], default="llama-3.1-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 64, 256])
    parser.add_argument("--long", type=int, default=0, help="requests of a step of long ones")
    parser.add_argument("--parts", action="store_true", help="also times by kind of kernel")
    parser.add_argument("--layers", type=int, help="of a shorter model, to fill caches of kernels")
    parser.add_argument("--prompts", type=int, default=8, help="beside each other; 0: none at all")
    parser.add_argument("--quick", action="store_true", help="no figures, to fill those caches")
    parser.add_argument("--device", default="cuda", help="as of an engine, cuda:0,cuda:1")
    parser.add_argument("--quantization", default="auto", help="auto or fp8")
    parser.add_argument("--gate", type=Path, help="folder by which calls take turns")
    parser.add_argument("--calls", type=int, default=1, help="that share the folder")
    parser.add_argument("--turn", type=int, default=0, help="of this call, from 0")
    parser.add_argument("--gate-s", type=float, default=120.0, help="longest wait for loading")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4], help="of sums")
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    # Tells when weights are there and graphs are captured.
    logging.basicConfig(level=logging.INFO, format="  %(relativeCreated)d ms: %(message)s")
    if len(set(devices := arguments.device.split(","))) < len(devices):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    asked, gate = arguments.quantization, None
    name = f"{arguments.model}-tp{arguments.tp}-ep{arguments.ep}"
    name += "" if asked == "auto" else f"-{asked}"
    if arguments.what == "sums":
        name = "sums"

    def keep(found: dict[str, Any]) -> None:
        if arguments.out:
            content = {**describe_gpu(arguments.commit), "results": found}
            (arguments.out / f"ranks-{name}.json").write_text(json.dumps(content, indent=1))

    if arguments.what == "sums":
        keep(sums(arguments.ranks))
    else:
        if arguments.gate is not None:
            gate = Gate(arguments.gate, arguments.calls, arguments.turn, arguments.gate_s)
        changed: dict[str, Any] = {}
        if arguments.layers is not None:
            kinds = (MODELS | LARGE_MODELS)[arguments.model].get("layer_types")
            changed = {"num_hidden_layers": arguments.layers}
            changed |= {} if kinds is None else {"layer_types": kinds[: arguments.layers]}
        case = Case(
            arguments.model,
            arguments.tp,
            arguments.ep,
            arguments.batches,
            arguments.long,
            arguments.parts,
            asked,
            arguments.prompts,
            arguments.quick,
            arguments.device,
            gate,
            changed,
        )
        try:
            engine_case(case, keep)
        finally:
            if gate is not None:
                gate.leave()


if __name__ == "__main__":
    main()
