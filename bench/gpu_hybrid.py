"""Speed of models with recurrent layers on a GPU, against the roof of the same run.

    python bench/gpu_hybrid.py [--parts kernels engine ...] [--models qwen3.5-9b ...] [--out DIR]

Kernels: a layer's states alone, decode steps against the bytes of states that they read, prompts
against the rate of a large product. Beside: prompts by fla-core's kernels. Engine: random weights
in the models' real shapes, decode, prompts, and requests of 1,024 tokens in and 128 out that are
sent at once. Mtp: decode with drafts of which a forced number is accepted.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_engine import release, run_batch
from gpu_roof import Rates, measure_rates
from gpu_setup import describe_gpu
from model_shapes import write_config
from torch.profiler import ProfilerActivity, profile
from weft.contract.errors import WeftError
from weft.engine.executor.drafts.chains import ChainShape, StaticChains
from weft.engine.loop.llm import LLM
from weft.engine.model.layers.rotary import Rotary
from weft.kernels.gated_delta import gated_delta
from weft.kernels.gpu import slot_states
from weft.kernels.mamba2 import mamba2
from weft.kernels.sequences import Sequences
from weft.kernels.slot_states import (
    Channels,
    DeltaGates,
    HeadForm,
    LayerMemory,
    plan_slots,
    step_delta,
)

MODELS = ("qwen3.5-9b", "qwen3-next-80b-a3b-12-layers")
PAGE, PROMPT_ROWS = 16, 8192
MANY, MANY_IN, MANY_OUT = 1024, 1024, 128
"""Requests sent at once, and their tokens."""
MANY_STEPS = (2240, 8192)
"""Rows of the steps; 2,240 with two prompts, as many as end in it, beside 256 decodes, of which 64
do not count.
"""
STEP_TILES = ((128, 4, 32), (64, 2, 32), (64, 2, 64), (16, 1, 32), (32, 4, 128))
"""Launch shapes of the kernel of decode steps that are timed: values of a head that one program
computes, its warps, and the keys that it multiplies at once.
"""
BF16 = torch.bfloat16
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "dummy_weights": True,
    "max_context_tokens": 5120,
    "max_running_requests": 256,
    "max_step_tokens": 8192,
    "prefill_chunk_tokens": 8192,
    "prefix_cache": False,
    "inter_token_target_s": 1.0,
}


def seconds(call: Callable[[], object], count: int = 10) -> float:
    """Median time of a call on the device."""
    call()
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def graph_seconds(call: Callable[[], object], count: int = 10) -> float:
    """The same of a call in a CUDA graph, as steps have it, without the host's time."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return seconds(graph.replay) / count


def delta_form() -> HeadForm:
    """A layer of Qwen3.5-9B and Qwen3-Next."""
    step = 2 * 128 + 2 * 128
    conv = torch.randn(4, 16 * step, device="cuda")
    first, second, third = (Channels(at, step) for at in (0, 128, 256))
    return HeadForm(conv, None, first, second, third, 32, 2, 128, 128, 128**-0.5, is_unit=True)


def bench_steps(rates: Rates) -> list[dict[str, Any]]:
    """Decode steps of one layer of gated delta net, in a page and at its end, and with drafts."""
    found, form = [], delta_form()
    chosen = slot_states._TILES
    channels = form.conv.shape[1]
    for batch in (1, 64, 256):
        blocks = (
            torch.randn(batch + 1, 32, 128, 128, device="cuda"),
            torch.randn(batch + 1, channels, 3, device="cuda", dtype=BF16),
        )
        rings = (
            torch.randn(batch + 1, 18, channels, device="cuda", dtype=BF16),
            *(torch.rand(batch + 1, 18, 32, device="cuda") for _ in "gb"),
        )
        kept = (
            torch.randn(batch + 1, 18, 16, 128, device="cuda", dtype=BF16) / 12,
            torch.randn(batch + 1, 18, 32, 128, device="cuda", dtype=BF16),
        )
        memory = LayerMemory(blocks, rings, kept)
        inputs = (
            torch.randn(3 * batch, channels, device="cuda", dtype=BF16),
            torch.randn(3 * batch, 64, device="cuda", dtype=BF16),
        )
        gates = DeltaGates(*-torch.rand(2, 32, device="cuda"), 32)
        slots = torch.arange(batch, device="cuda")
        table = (slots + 1)[:, None].expand(-1, 3).contiguous()
        for tile, (behind, count) in itertools.product(STEP_TILES, ((14, 1), (15, 1), (10, 3))):
            slot_states._TILES = dict.fromkeys(slot_states._TILES, tile)
            borders = torch.full((batch + 1,), 4 * PAGE, device="cuda")
            bounds = count * torch.arange(batch + 1, device="cuda", dtype=torch.int32)
            positions = 4 * PAGE + behind + torch.arange(count * batch, device="cuda") % count
            of_rows = inputs[0][: count * batch], inputs[1][: count * batch]
            ends = torch.full_like(borders, 4 * PAGE + behind)
            rows = plan_slots(slots, bounds, positions, borders, ends, table, PAGE)
            given = form, gates, rows, memory, of_rows
            took = graph_seconds(partial(step_delta, *given))
            roof = batch * 32 * 128 * 128 * 4 / rates.bytes_per_s
            row = {"tile": tile, "batch": batch, "behind": behind, "rows": count}
            found.append(row | {"us": 1e6 * took, "share": roof / took})
            print(
                f"step of {batch:3}, {tile}, {count} behind {behind:2}: {1e6 * took:7.1f} us, "
                f"{roof / took:6.1%} of the bytes' roof",
                flush=True,
            )
    slot_states._TILES = chosen
    return found


def bench_prompt(rates: Rates, *, beside: bool = False) -> list[dict[str, Any]]:
    """A prompt's rows through one layer's states; `beside`: by the kernels of fla-core."""
    found = []
    rows = PROMPT_ROWS
    bounds = Sequences.of(torch.tensor([0, rows], device="cuda"))
    q, k = (torch.randn(rows, 16, 128, device="cuda", dtype=BF16) for _ in "qk")
    v = torch.randn(rows, 32, 128, device="cuda", dtype=BF16)
    decay, beta = -torch.rand(rows, 32, device="cuda") / 8, torch.rand(rows, 32, device="cuda")
    by_element = -torch.rand(rows, 32, 128, device="cuda") / 8
    states = torch.zeros(1, 32, 128, 128, device="cuda")
    wide_q, wide_k = (part.repeat_interleave(2, dim=1) for part in (q, k))
    x = torch.randn(rows, 128, 64, device="cuda", dtype=BF16)
    b, c = (torch.randn(rows, 1, 128, device="cuda", dtype=BF16) for _ in "bc")
    dt, a, d = (
        torch.rand(rows, 128, device="cuda") / 8,
        -torch.rand(128).cuda(),
        torch.rand(128).cuda(),
    )
    ssd = torch.zeros(1, 128, 128, 64, device="cuda")
    flop = 8 * rows * 32 * 128 * 128
    """The least: each row's key finds, writes and reads in a state."""
    calls: dict[str, tuple[float, Callable[[], object]]] = {
        "gated delta": (flop, lambda: gated_delta(q, k, v, decay, beta, states, bounds)),
        "delta by element": (
            flop,
            lambda: gated_delta(wide_q, wide_k, v, by_element, beta, states, bounds),
        ),
        "mamba2": (4 * rows * 128 * 128 * 64, lambda: mamba2(x, dt, a, b, c, d, ssd, bounds)),
    }
    if beside:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla

        options = {"initial_state": states, "output_final_state": True}
        of_heads = options | {"use_qk_l2norm_in_kernel": True}
        gates = decay[None], beta[None].to(BF16)
        by_group = [part[None].expand(-1, -1, 128, -1).contiguous() for part in (c, b)]
        delta = wide_q[None], wide_k[None], v[None]
        of_ssd = options | {"initial_state": ssd, "scale": 1.0}
        calls = {
            "gated delta": (flop, lambda: chunk_gated_delta_rule(*delta, *gates, **of_heads)),
            "delta by element": (
                flop,
                lambda: chunk_kda(*delta, by_element[None], gates[1], **of_heads),
            ),
            "mamba2, as simple gla": (
                4 * rows * 128 * 128 * 64,
                lambda: chunk_simple_gla(*by_group, x[None], (dt * a)[None], **of_ssd),
            ),
        }
    for name, (work, call) in calls.items():
        try:
            took = seconds(call, 4)
        except Exception as error:
            print(f"{name}: {error!r}"[:300])
            continue
        share = work / rates.flop_per_s / took
        found.append({"kernel": name, "ms": 1e3 * took, "share": share})
        told = f"fla-core: {name}" if beside else name
        print(
            f"{told}, {rows} rows: {1e3 * took:.3f} ms, {share:.1%} of the products' rate",
            flush=True,
        )
    return found


class Costs:
    """The least bytes and products of a model's steps.

    Args:
        llm: With the model.
    """

    def __init__(self, llm: LLM) -> None:
        info = llm.engine.info
        executor = llm.engine._executor
        config = executor._model.config
        self.config = config
        self.kv_bytes = info.page_bytes / info.page_size
        states = executor.states
        assert states is not None
        self.state_bytes = sum(pool[0].nbytes for pool in states.pools.blocks)
        hidden, vocab = config.hidden_size, config.vocab_size
        moe, layers = config.moe, config.num_layers
        seen: set[int] = set()
        total = float(sum(sizes_of(executor._model, seen)))
        self.dense = total - 2 * vocab * hidden
        self.experts = 0.0
        if moe is not None:
            self.experts = 6.0 * hidden * moe.intermediate_size * moe.num_experts * layers
            self.dense -= self.experts

    def decode_seconds(self, rates: Rates, batch: int, context: float) -> float:
        """Least time of a decode step: weights, K and V, states, each read once."""
        moe, read = self.config.moe, 0.0
        if moe is not None:
            missed = (1 - moe.num_experts_per_tok / moe.num_experts) ** batch
            read = self.experts * (1 - missed)
        kept = batch * (context * self.kv_bytes + self.state_bytes)
        return (self.dense + read + kept) / rates.bytes_per_s

    def prompt_seconds(self, rates: Rates, tokens: int) -> float:
        """Least time of prompts' products with weights, without attention."""
        moe, used = self.config.moe, self.dense
        head = 2.0 * self.config.vocab_size * self.config.hidden_size
        if moe is not None:
            used += self.experts * moe.num_experts_per_tok / moe.num_experts
        return tokens * (used - head) / rates.flop_per_s


def sizes_of(part: Any, seen: set[int]) -> list[int]:
    """Bytes of all tensors that belong to a model, each once, without tables of rotations, of which
    a step reads single rows.
    """
    if isinstance(part, torch.Tensor):
        at = part.untyped_storage().data_ptr()
        if at in seen or not part.is_cuda:
            return []
        seen.add(at)
        return [part.untyped_storage().nbytes()]
    if id(part) in seen or isinstance(part, str | int | float | type(None)):
        return []
    seen.add(id(part))
    if isinstance(part, Rotary):
        return []
    if isinstance(part, dict):
        inner = list(part.values())
    elif isinstance(part, list | tuple | set):
        inner = list(part)
    elif hasattr(part, "__dict__"):
        inner = [each for name, each in vars(part).items() if name != "cos_sin"]
    elif hasattr(part, "__slots__"):
        inner = [getattr(part, name, None) for name in part.__slots__]
    else:
        return []
    return [size for each in inner for size in sizes_of(each, seen)]


def told_kernels(call: Callable[[], object], what: str, steps: int) -> list[dict[str, Any]]:
    """Prints the kernels that take the most time of a call, and returns more of them."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as taken:
        call()
        torch.cuda.synchronize()
    return tell_kernels(taken, what, steps)


def tell_kernels(taken: profile, what: str, steps: int) -> list[dict[str, Any]]:
    """The same of a profile that has been taken."""
    rows = [row for row in taken.key_averages() if row.self_device_time_total > 0]
    rows.sort(key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(f"{what}: device {total / steps / 1e3:.2f} ms a step")
    for row in rows[:14]:
        share = row.self_device_time_total / total
        print(
            f"  {share:6.1%} {row.self_device_time_total / row.count:8.1f} us x {row.count:5} "
            f"{row.key[:70]}"
        )
    return [
        {
            "kernel": row.key[:90],
            "us": row.self_device_time_total / row.count,
            "per_step": row.count / steps,
            "share": row.self_device_time_total / total,
        }
        for row in rows[:50]
    ]


class Load(NamedTuple):
    """What `bench_engine` runs."""

    batches: list[int]
    """Of decode."""
    profiled: list[int]
    """Those of which kernels are told; if any, also of prompts and of mixed steps."""
    requests: int
    """Sent at once; 0: none."""
    step_rows: list[int]
    """Rows of steps in which these are computed."""
    budget_s: float
    """Time, after which nothing more begins."""


def bench_engine(
    name: str, rates: Rates, load: Load, found: dict[str, Any], save: Callable[[], None]
) -> None:
    """Puts all measurements of one model that fit into the time into `found`."""
    began, budget_s, profiled = time.perf_counter(), load.budget_s, load.profiled
    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), name)
        with LLM(path, **SETTINGS) as llm:
            print(*llm.engine.info.notices, sep="\n")
            gc.collect()
            gc.freeze()
            costs = Costs(llm)
            print(
                f"{name}: loaded and captured after {time.perf_counter() - began:.0f} s; weights "
                f"{costs.dense / 1e9:.1f} + {costs.experts / 1e9:.1f} GB, a state "
                f"{costs.state_bytes / 1e6:.1f} MB",
                flush=True,
            )
            for batch in load.batches:
                save()
                if time.perf_counter() - began > budget_s:
                    return
                run_batch(llm, batch, 512, 8)
                run = run_batch(llm, batch, 512, 64)
                if not run.num_steps:
                    print(f"decode {batch}: there is no memory for as many at once", flush=True)
                    continue
                took = run.seconds / run.num_steps
                host = statistics.median(run.host_s) if run.host_s else 0.0
                least = costs.decode_seconds(rates, batch, 544)
                found[f"decode {batch}"] = {
                    "tokens_per_s": batch / took,
                    "share": least / took,
                    "step_ms": 1e3 * took,
                    "host_ms": 1e3 * host,
                }
                print(
                    f"decode {batch:3}: {batch / took:9.1f} tok/s, step {1e3 * took:.2f} ms, "
                    f"host {1e3 * host:.2f} ms, {least / took:.1%} of the roof, "
                    f"{run.num_steps} steps",
                    flush=True,
                )
                if batch in profiled:
                    some = partial(run_batch, llm, batch, 32, 20)
                    kernels = told_kernels(some, f"decode {batch}", 20)
                    found[f"decode {batch}"]["kernels"] = kernels
            for length in (1024, 4096):
                save()
                if time.perf_counter() - began > budget_s:
                    return
                times = [run_batch(llm, 8, length, 2).first_token_s for _ in range(3)]
                least = costs.prompt_seconds(rates, 8 * length)
                rate = 8 * length / min(times)
                found[f"prefill 8 x {length}"] = {"tokens_per_s": rate, "share": least / min(times)}
                print(
                    f"prefill 8 x {length:,}: {rate:,.0f} tok/s, {least / min(times):.1%} of the "
                    "roof",
                    flush=True,
                )
            if profiled and time.perf_counter() - began < budget_s:
                some = partial(run_batch, llm, 8, 1024, 2)
                kernels = told_kernels(some, "prefill 8 x 1,024", 1)
                found["prefill 8 x 1024"]["kernels"] = kernels
            limits = llm.engine.scheduler._limits
            llm.engine.scheduler._limits = limits._replace(max_step_tokens=load.step_rows[0])
            if profiled and load.requests and time.perf_counter() - began < budget_s:
                mixed = partial(run_batch, llm, 64, MANY_IN, 32)
                steps, took = 64 * MANY_IN / 2048, mixed().all_seconds
                what = f"64 of {MANY_IN}/32, {1e3 * took / steps:.1f} ms"
                found["mixed"] = {"kernels": told_kernels(mixed, what, int(steps))}
            for rows in load.step_rows if load.requests else ():
                save()
                if time.perf_counter() - began > budget_s:
                    break
                llm.engine.scheduler._limits = limits._replace(max_step_tokens=rows)
                run = run_batch(llm, load.requests, MANY_IN, MANY_OUT)
                rate = load.requests * (MANY_IN + MANY_OUT) / run.all_seconds
                found[f"total, steps of {rows}"] = {
                    "tokens_per_s": rate,
                    "requests": load.requests,
                }
                print(
                    f"{load.requests} of {MANY_IN}/{MANY_OUT}, steps of up to {rows:,}: "
                    f"{rate:,.0f} total tok/s",
                    flush=True,
                )
            llm.engine.scheduler._limits = limits


class ForcedChains:
    """Has a head's chains be accepted at a mean length, whatever its weights: the LM head gives all
    tokens the same logits, so that one token is always drawn, and drafts are it or another.

    Of one chain after another 0, 1, ... `depth` drafts are accepted, and then the same again. Where
    a request begins in this order depends on its slot.

    Args:
        depth: Drafts of a chain.
        device: Of the model.
    """

    def __init__(self, depth: int, device: str = "cuda") -> None:
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        """The token that is drawn."""
        begins = list(itertools.accumulate(range(depth + 2)))
        accepted = [
            next(begin for begin in begins if begin > at) - at - 1 for at in range(begins[-1])
        ]
        self._accepted = torch.tensor(accepted, device=device)
        self._run = StaticChains.run

    def run(self, chains: StaticChains, shape: ChainShape) -> torch.Tensor:
        """In place of `StaticChains.run`, which does its work too."""
        found = self._run(chains, shape)
        slots, starts, *_ = chains._inputs.request_rows(shape.requests)
        known = chains._known
        at = (torch.where(starts < 0, known.starts[slots], starts) + slots) % len(self._accepted)
        drafts = torch.arange(shape.depth, device=slots.device)[:, None]
        found.copy_(torch.where(drafts < self._accepted[at], self.right, self.right + 1))
        known.tokens[1 : 1 + shape.depth].index_copy_(1, slots, found)
        return found


def bench_mtp(
    name: str,
    depths: list[int],
    profiled: list[int],
    budget_s: float,
    found: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Decode with the checkpoint's MTP head, at forced acceptance lengths, and without."""
    began = time.perf_counter()
    for depth in depths:
        if time.perf_counter() - began > budget_s:
            break
        release()
        forced, run_of = ForcedChains(max(1, depth)), StaticChains.run
        settings: dict[str, Any] = {"mtp_head": True}
        if depth:
            settings = {"drafter": "mtp", "draft_gate": "fixed", "max_draft_tokens": depth}
            StaticChains.run = lambda chains, shape: forced.run(chains, shape)  # type: ignore[method-assign]  # noqa: B023
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = write_config(Path(folder), name)
                with LLM(path, **(SETTINGS | {"max_running_requests": 64}), **settings) as llm:
                    llm.engine._executor._model._target.lm_head.weight.data.zero_()  # type: ignore[attr-defined]
                    forced.right.fill_(run_batch(llm, 1, 64, 8).tokens[0][-1])
                    for batch in (1, 64):
                        before = llm.engine.counters()
                        run_batch(llm, batch, 512, 8)
                        run = run_batch(llm, batch, 512, 96)
                        after = llm.engine.counters()
                        drafted, accepted = (
                            after[count] - before[count]
                            for count in ("drafted_tokens", "accepted_tokens")
                        )
                        length = 1 + accepted * depth / max(1, drafted)
                        took = run.seconds / max(1, run.num_steps)
                        rate = batch * length / took
                        found[f"depth {depth}, batch {batch}"] = {
                            "length": length,
                            "tokens_per_s": rate,
                            "step_ms": 1e3 * took,
                        }
                        print(
                            f"MTP {depth} drafts, batch {batch:2}: length {length:.2f}, "
                            f"{rate:8.1f} tok/s, step {1e3 * took:.2f} ms",
                            flush=True,
                        )
                        if batch in profiled:
                            told_kernels(partial(run_batch, llm, batch, 64, 40), "MTP", 20)
                        save()
            del llm  # Two do not fit.
        finally:
            StaticChains.run = run_of  # type: ignore[method-assign]


def main() -> None:
    """Runs the parts that are asked for; what fails is told, and the others go on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--parts", nargs="+", default=["kernels", "engine"], help="also beside, mtp"
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of each model")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 0, 1, 3], help="of drafts")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--profiled", nargs="*", type=int, default=[64], help="batches")
    parser.add_argument("--requests", type=int, default=MANY, help="sent at once; 0: none")
    parser.add_argument("--step-rows", nargs="+", type=int, default=list(MANY_STEPS))
    parser.add_argument("--commit", default="", help="of the sources, for the JSON")
    parser.add_argument("--out", type=Path, help="folder for the JSON")
    arguments = parser.parse_args()
    setup, rates = describe_gpu(arguments.commit), measure_rates()
    release()
    found: dict[str, Any] = {**setup, "bytes_per_s": rates.bytes_per_s}
    found["flop_per_s"] = rates.flop_per_s
    print(
        f"{setup['device']}: copy {rates.bytes_per_s / 1e12:.2f} TB/s, products "
        f"{rates.flop_per_s / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    parts: dict[str, Callable[[], Any]] = {}
    if "kernels" in arguments.parts:
        parts |= {"steps": partial(bench_steps, rates), "prompt": partial(bench_prompt, rates)}
    if "beside" in arguments.parts:
        parts["beside"] = partial(bench_prompt, rates, beside=True)

    def save() -> None:
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            (arguments.out / "hybrid.json").write_text(json.dumps(found, indent=1))

    load = Load(
        arguments.batches,
        arguments.profiled,
        arguments.requests,
        arguments.step_rows,
        arguments.budget,
    )
    for name in arguments.models:
        if "engine" in arguments.parts:
            own: dict[str, Any] = {}
            parts[name] = partial(bench_engine, name, rates, load, own, save)
            found[name] = own
        if "mtp" in arguments.parts:
            own = {}
            parts[f"{name} mtp"] = partial(
                bench_mtp, name, arguments.depths, arguments.profiled, arguments.budget, own, save
            )
            found[f"{name} mtp"] = own
    for name, measure in parts.items():
        release()
        try:
            made = measure()
            if made is not None:
                found[name] = made
        except (RuntimeError, WeftError) as error:
            print(f"{name}: {error!r}"[:1500], flush=True)
        save()


if __name__ == "__main__":
    main()
