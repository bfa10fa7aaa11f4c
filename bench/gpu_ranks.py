"""Speed of engines on one GPU and on several, beside one another, and of sums over ranks.

    python bench/gpu_ranks.py --only sums [--ranks 2 4]
    python bench/gpu_ranks.py --only engine --model llama-3.1-8b --tp 2 [--ep 2] [--parts]
    python bench/gpu_ranks.py --only engine --model llama-3.1-8b --cp 2 --batches
    python bench/gpu_ranks.py --only engine --model llama-3.1-8b --pp 2 --hosts 2
    python bench/gpu_ranks.py --only engine --model deepseek-v3-12-layers-fp8 --tp 2 --ep 2 \
        --dcp 2 --kv-gib 2 --context 4096 --batches --prompts 0

Weights are made up on the devices, in the models' real shapes. The roof of a decode step is the
time to read its weights and KV once, divided among the cards, at their nominal 3.35 TB/s (H200:
4.8); that of a prompt the time to multiply at the nominal 989 TFLOP/s a card. Several calls may
load beside each other: with `--gate DIR --calls N` each measures once all N are loaded and those of
lower `--turn` have measured. Of those that load beside each other on one card at most one may have
ranks: processes take a card in turns, and a sum then waits for the turns of all ranks.

`--long 128` adds a decode step of 128 requests with some 1,500 tokens behind each, as in the middle
of answers of 1,024 to prompts of 1,024, and from it and the rate of prompts their output tokens a
second and card.

`--kv-gib` gives each card a pool of so many GiB, and `--context` asks how many requests of so many
tokens it then holds: their number, their tokens a second, and those of half as many, which is what
two ranks hold that do not divide pages.

`--parts` adds where a step's time goes. On the device a kernel counts from the end of what ran
before it, so that kernels which start early do not count their wait for others, and all times add
up to the step's; a sum contains the wait for the other ranks. On the host it times the calls that
are known to take long, and those that ranks add.

With `--hosts` NCCL carries the rows between stages: over NVLink, or over sockets of the loopback
device with NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_IB_DISABLE=1 in the environment.
`--link-gbit 25` takes sockets between network namespaces, whose rates the kernel bounds.
`rows of stages` says what travels for a token, and which share of the time of prompts it would take
on a link of 25 Gbit/s, both by arithmetic.

`--quick` runs every kind of step but a few times, which fills caches of compiled kernels; ranks may
then share a card, as in `--device cuda:0,cuda:0 --layers 2`.

`sums` measures captured sums of bfloat16 rows of 4,096 numbers over ranks, 64 in a graph: this
project's (with residual and norm, in one and in two exchanges), torch's symmetric memory and NCCL
(the sum alone); all ranks must get the same bits.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import statistics
import sys
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
from clocks import event_s
from engine_runs import random_prompts, run_batch, run_requests
from gpu_engine import GPU_SETTINGS
from gpu_roof import IN_BFLOAT16, Rates, WeightBytes, decode_work, prompt_work
from harness import Harness, Run, spread
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
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.norm.triton_rms import add_rms_norm
from weft.testing.engine.host_network import Network
from weft.testing.engine.other_hosts import other_hosts

CARD, H200 = Rates(3.35e12, 989e12), Rates(4.8e12, 989e12)
PROMPT_TOKENS, NEW_TOKENS = 256, 96
LONG_TOKENS, ANSWER_TOKENS = 1_408, 1_024
STEP_TOKENS = 8_192
"""Most tokens of a step."""
TRACED_STEPS = 10
LINK_BITS = 25e9
WIDTH, PER_GRAPH = 4096, 64
SUM_KIB = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SUM_LIMIT_S = 60.0
"""Longest wait for the next figure of sums."""
Options = Any
"""The flags below."""

harness = Harness(__file__, __doc__)
harness.flag("--model", choices=[*MODELS, *LARGE_MODELS], default="llama-3.1-8b")
harness.flag("--tp", type=int, default=1)
harness.flag("--ep", type=int, default=1)
harness.flag("--pp", type=int, default=1)
harness.flag("--hosts", type=int, default=1, help="as many as pp: a process each, on this machine")
harness.flag("--link-gbit", type=float, help="rate at which hosts send; default: not bounded")
harness.flag("--cp", type=int, default=1)
harness.flag("--dcp", type=int, default=1)
harness.flag("--kv-gib", type=float, help="of a card's pool; default: enough pages for the rest")
harness.flag("--context", type=int, default=0, help="tokens of requests that fill the pool")
harness.flag("--page-size", type=int, default=16)
harness.flag("--lengths", nargs="*", type=int, default=[2048, 8192], help="of lone prompts")
harness.flag("--batches", nargs="*", type=int, default=[1, 64, 256])
harness.flag("--long", type=int, default=0, help="requests of a step of long ones")
harness.flag("--parts", action="store_true", help="also times by kind of kernel")
harness.flag("--layers", type=int, help="of a shorter model, to fill caches of kernels")
harness.flag("--prompts", type=int, default=8, help="beside each other; 0: none at all")
harness.flag("--quick", action="store_true", help="no figures, to fill those caches")
harness.flag("--device", default="cuda", help="as of an engine, cuda:0,cuda:1")
harness.flag("--quantization", default="auto", help="auto or fp8")
harness.flag("--gate", type=Path, help="folder by which calls take turns")
harness.flag("--calls", type=int, default=1, help="that share the folder")
harness.flag("--turn", type=int, default=0, help="of this call, from 0")
harness.flag("--gate-s", type=float, default=120.0, help="longest wait for loading")
harness.flag("--ranks", nargs="+", type=int, default=[2, 4], help="of sums")
KINDS = {
    "sums over ranks": ("_sum_kernel", "nccl"),
    "rows to experts": ("_send_kernel", "_return_kernel"),
    "tokens to ranks": ("_share_kernel",),
    "pages of ranks": ("_queries_kernel", "_results_kernel"),
    "attention": ("attention", "attend", "_decode_kernel", "_merge", "flash", "latent"),
    "drawing": ("greedy", "draw", "sampl", "keep_tokens", "_largest", "_gather_kernel"),
    "experts": (
        *("_direct_", "_fp8_inner_", "_fp8_out_", "_sorted_", "_rounded_", "_route_", "_count_"),
        *("_place_", "_combine_", "_few_kernel", "moe"),
    ),
    "products": ("gemm", "nvjet", "cutlass", "linear", "product", "matmul", "tile", "_mm", "fp8"),
}
"""Kinds of kernels by parts of their names; the first that fits."""


HOST_CALLS: dict[str, tuple[Any, str]] = {
    "graphs launched": (torch.cuda.CUDAGraph, "replay"),
    "frames made": (ranked, "encode_step"),
    "pages told": (ranked.SentPages, "take"),
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


def pages_of(case: Options) -> int:
    """Pages of 16 tokens that the largest batch and the prompts take, and some more."""
    prompts = max(case.prompts * 4_096, *case.lengths, 0) // 16
    rows = max(case.batches, default=0) * (PROMPT_TOKENS + NEW_TOKENS) // 16
    long = case.long * (LONG_TOKENS + long_new_tokens(case.long)) // 16
    pages = 640 + max(prompts, rows, long) // 16 * 16
    return min(pages, 2_048) if case.quick else pages


def long_new_tokens(requests: int) -> int:
    """New tokens of each long request, so that all requests decode together for NEW_TOKENS steps:
    the first request also generates while the other prompts are computed, which takes up to
    2 * requests * LONG_TOKENS / STEP_TOKENS steps.
    """
    return NEW_TOKENS + 2 * requests * LONG_TOKENS // STEP_TOKENS


def engine_case(run: Run, gate: Gate | None, changed: dict[str, Any]) -> None:
    """Measures one model on some GPUs."""
    case, name = run.options, run.options.model
    ranks = {"tp": case.tp, "ep": case.ep, "pp": case.pp, "cp": case.cp, "dcp": case.dcp}
    cards = case.tp * case.pp * case.cp
    began = time.perf_counter()
    links = {"hosts": case.hosts, "link_gbit": case.link_gbit}
    run.keep(model=name, **ranks, **links, quantization=case.quantization)
    with tempfile.TemporaryDirectory() as folder:
        model_dir = write_config(Path(folder), name, **changed)
        config = ModelConfig.load(model_dir)
        settings: dict[str, Any] = {
            **GPU_SETTINGS,
            "device": case.device,
            "num_pages": None if case.kv_gib else pages_of(case) * 16 // case.page_size,
            "page_size": case.page_size,
            "max_context_tokens": max(8_192, case.context, *case.lengths) + 256,
            "max_running_requests": max(512 if case.context else 64, case.long, *case.batches),
            "rank_timeout_s": 60.0,
            "quantization": case.quantization,
        }
        if case.kv_gib:
            settings["kv_memory_bytes"] = int(case.kv_gib * 2**30)
        sizes = weight_bytes(config, case.quantization)
        if case.hosts > 1:
            devices = [f"cuda:{host}" for host in range(case.hosts)]
            network = bounded_network(run) if case.link_gbit else None
            others = other_hosts(model_dir, case.hosts, network, devices)
            hosts = run.stack.enter_context(others)
            settings |= hosts | {"num_threads": None}
        with LLM(model_dir, **settings | ranks) as llm:
            gc.collect()
            gc.freeze()
            free = torch.cuda.mem_get_info()[0] / 2**30
            run.row(table="start", model=name, s=time.perf_counter() - began, free_gib=free)
            if gate is not None:
                gate.wait()
            measuring = time.perf_counter()
            card = H200 if "H200" in torch.cuda.get_device_name() else CARD
            rates = Rates(card.bytes_per_s * cards, card.flop_per_s * cards)
            for batch in case.batches:
                figures = decode(
                    *(llm, config, batch, PROMPT_TOKENS, rates, sizes, case.quick), lanes=case.pp
                )
                if case.quick:
                    continue
                run.row(table="decode", batch=batch, **figures)
                if case.parts:
                    of_step, single = parts_of_step(llm, batch)
                    run.row(of_step, table="us of a step by kind of kernel", batch=batch)
                    most = dict(sorted(single.items(), key=lambda entry: -entry[1])[:14])
                    run.row(most, table="us of a step by kernel", batch=batch)
                    run.row(host_parts(llm, batch), table="us of a step on the host", batch=batch)
            if case.context and not case.quick:
                fit = contexts_that_fit(llm, case.context)
                for count in (fit, fit // 2):
                    figures = decode(llm, config, count, case.context, rates, sizes, False)
                    run.row(figures, table="contexts", requests=count, fit=fit)
            rate = prompts(run, llm, config, rates) if case.prompts else None
            if rate is not None and case.hosts > 1:
                row_bits = 16 * config.hidden_size
                share = rate * row_bits / LINK_BITS
                run.row(table="rows of stages", bytes=row_bits // 8, of_25_gbit_s=share)
            if case.prompts and case.parts and not case.quick:
                run.row(parts_of_prompts(llm, case.prompts), table=f"us of {STEP_TOKENS:,} tokens")
            if case.long and not case.quick:
                long_answers(run, llm, config, rates, sizes, rate)
            print(f"  measured in {time.perf_counter() - measuring:.0f} s", flush=True)


def bounded_network(run: Run) -> Network:
    """A network namespace for each host but this process's, which sends at a bounded rate."""
    network = Network(run.options.hosts, run.stack)
    bits_per_s = 1e9 * run.options.link_gbit
    if not all(network.shape(host, bits_per_s) for host in range(1, run.options.hosts)):
        raise SystemExit("needs root, network namespaces and tc's token buckets")
    return network


def contexts_that_fit(llm: LLM, tokens: int) -> int:
    """Requests of so many tokens, and NEW_TOKENS more, that the pool holds at once."""
    page_size = llm.engine.parts.local.facts.page_size
    pages = llm.engine.memory.counts().free // -(-(tokens + NEW_TOKENS) // page_size)
    return min(pages, llm.engine.config.max_running_requests)


def decode(
    llm: LLM,
    config: ModelConfig,
    batch: int,
    prompt_tokens: int,
    rates: Rates,
    sizes: WeightBytes,
    is_quick: bool,
    new_tokens: int = NEW_TOKENS,
    lanes: int = 1,
) -> dict[str, float]:
    """Steady decode at one batch size behind prompts of one length, the better of two runs if those
    are short. A step is one in which all requests get a token: with stages, a step of each lane.
    """
    run_batch(llm, batch, 32, 8)
    if is_quick:
        run_batch(llm, min(batch, 64), prompt_tokens, 4)
        return {}
    tries = 2 if batch * prompt_tokens < 128 * PROMPT_TOKENS else 1
    runs = [run_batch(llm, batch, prompt_tokens, new_tokens) for _ in range(tries)]
    run = min(runs, key=lambda run: run.seconds / run.num_steps)
    step_s = lanes * run.seconds / run.num_steps
    context = prompt_tokens + new_tokens - run.num_steps / 2
    roof_s = decode_work(config, batch, context, sizes).seconds(rates)
    host_s = sorted(second for run in runs for second in run.host_s)
    host_ms, host_p10_ms = (1e3 * host_s[len(host_s) * part // 10] for part in (5, 1))
    row = {"step_ms": 1e3 * step_s, "tok_s": batch / step_s, "share": roof_s / step_s}
    row |= {"host_ms": host_ms, "host_p10_ms": host_p10_ms, "roof_ms": 1e3 * roof_s}
    return row


def prompts(run: Run, llm: LLM, config: ModelConfig, rates: Rates) -> float | None:
    """First tokens of lone prompts, and prompts beside each other, whose rate is returned."""
    if run.options.quick:
        for batch, length in ((1, 2048), (1, 8192), (2, 4096)):
            run_batch(llm, batch, length, 2)
        return None
    for length in run.options.lengths:
        times = [run_batch(llm, 1, length, 2).first_token_s for _ in range(4)]
        found, roof = spread(times[1:], 1e3), prompt_work(config, [length]).seconds(rates)
        share = 1e3 * roof / found.median
        run.row(table="first token", prompt=length, ms=found, share=share, all_s=times)
    count = run.options.prompts
    took = min(run_batch(llm, count, 4096, 2).first_token_s for _ in range(2))
    rate, roof = count * 4096 / took, prompt_work(config, [4096] * count).seconds(rates)
    run.row(table="prompts of 4,096 tokens", prompts=count, tok_s=rate, share=roof / took)
    return rate


def long_answers(
    run: Run,
    llm: LLM,
    config: ModelConfig,
    rates: Rates,
    sizes: WeightBytes,
    prompt_rate: float | None,
) -> None:
    """Output tokens a second and card of prompts and answers of 1,024 tokens, by arithmetic."""
    count = run.options.long
    row = decode(llm, config, count, LONG_TOKENS, rates, sizes, False, long_new_tokens(count))
    answer_s = ANSWER_TOKENS * row["step_ms"] / 1e3 / count
    prompt_s = ANSWER_TOKENS / prompt_rate if prompt_rate else 0.0
    cards = run.options.tp * run.options.pp * run.options.cp
    rate = ANSWER_TOKENS / (answer_s + prompt_s) / cards
    run.row(row, table="1,024 tokens in and out", requests=count, tok_s_card=rate)


def parts_of_step(llm: LLM, batch: int) -> tuple[dict[str, float], dict[str, float]]:
    """Microseconds of a decode step on rank 0, by kind of kernel and in none, and by kernel."""
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
    return {**found, "kernels": count}, single


def parts_of_prompts(llm: LLM, count: int) -> dict[str, float]:
    """Microseconds of STEP_TOKENS tokens of prompts by kind of kernel, on rank 0, and in none."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run_batch(llm, count, 4_096, 2)
        torch.cuda.synchronize()
    steps = count * 4_096 / STEP_TOKENS
    times = {name: us / steps for name, us in parts_of(spans_of(trace)).items()}
    return {name: us for name, us in times.items() if not name.startswith("_: ")}


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
            call = adding(getattr(owner, name), what, times)
            stack.enter_context(mock.patch.object(owner, name, call))
        run = run_batch(llm, batch, PROMPT_TOKENS, NEW_TOKENS, note)
    found = {what: 1e6 * seconds / count for what, seconds in known.items()}
    found["rest"] = 1e6 * statistics.mean(run.host_s[1:]) - sum(found.values())
    return found


def adding(
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


@harness.part_if_named
def sums(run: Run) -> None:
    """Microseconds of a sum by number of ranks, way and KiB, as far as ranks have come."""
    context = multiprocessing.get_context("fork")
    for size in run.options.ranks:
        table = defaultdict[str, dict[str, float]](dict)
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
                table[way][f"{kib} KiB"] = us
            for rank in ranks:
                rank.kill()
                rank.join()
        for way, row in table.items():
            run.row(table=f"us of sums over {size} ranks", way=way, **row)


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
        peers[-1].close()
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
        graph.replay()
        times.append(1e6 * event_s(lambda: [graph.replay() for _ in range(3)]) / (3 * PER_GRAPH))
    return min(times[1:])


@harness.part
def engine(run: Run) -> None:
    """One model on some GPUs."""
    options, gate = run.options, None
    # Tells when weights are there and graphs are captured.
    logging.basicConfig(level=logging.INFO, format="  %(relativeCreated)d ms: %(message)s")
    if len(set(devices := options.device.split(","))) < len(devices):
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    if options.gate is not None:
        gate = Gate(options.gate, options.calls, options.turn, options.gate_s)
    changed: dict[str, Any] = {}
    if options.layers is not None:
        kinds = (MODELS | LARGE_MODELS)[options.model].get("layer_types")
        changed = {"num_hidden_layers": options.layers}
        changed |= {} if kinds is None else {"layer_types": kinds[: options.layers]}
    try:
        engine_case(run, gate, changed)
    finally:
        if gate is not None:
            gate.leave()


if __name__ == "__main__":
    sys.exit(harness.main())
