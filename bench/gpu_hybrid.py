"""Speed of models with recurrent layers on a GPU, against the roof of the same run.

    python bench/gpu_hybrid.py [--only kernels engine beside mtp] [--models qwen3.5-9b ...]

Kernels: a layer's states alone, decode steps against the bytes of states that they read, prompts
against the rate of a large product. Beside: prompts by fla-core's kernels. Engine: random weights
in the models' real shapes, decode, prompts, and requests of 1,024 tokens in and 128 out that are
sent at once. Mtp: decode with drafts of which a forced number is accepted.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clocks import graph_us, median_s, release
from engine_runs import run_batch
from gpu_engine import GPU_SETTINGS
from gpu_roof import Rates, kept_rates
from harness import Harness, Run
from model_shapes import write_config
from torch.profiler import ProfilerActivity, profile
from weft.engine.executor.drafts.chains import ChainShape, StaticChains
from weft.engine.loop.llm import LLM
from weft.engine.model.layers.rotary import Rotary
from weft.kernels.ops.gated_delta import gated_delta
from weft.kernels.ops.mamba2 import mamba2
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.slot_states import plan_slots, step_delta
from weft.kernels.ops.slot_states import triton_states as slot_states
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory

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
SETTINGS = {**GPU_SETTINGS, "max_running_requests": 256, "prefill_chunk_tokens": 8192}

harness = Harness(__file__, __doc__)
harness.flag("--models", nargs="+", default=list(MODELS))
harness.flag("--budget", type=float, default=60.0, help="seconds of each model")
harness.flag("--depths", nargs="+", type=int, default=[2, 0, 1, 3], help="of drafts")
harness.flag("--batches", nargs="*", type=int, default=[1, 16, 64, 256])
harness.flag("--profiled", nargs="*", type=int, default=[64], help="batches")
harness.flag("--requests", type=int, default=MANY, help="sent at once; 0: none")
harness.flag("--step-rows", nargs="+", type=int, default=list(MANY_STEPS))


def delta_form() -> HeadForm:
    """A layer of Qwen3.5-9B and Qwen3-Next."""
    step = 2 * 128 + 2 * 128
    conv = torch.randn(4, 16 * step, device="cuda")
    first, second, third = (Channels(at, step) for at in (0, 128, 256))
    return HeadForm(conv, None, first, second, third, 32, 2, 128, 128, 128**-0.5, is_unit=True)


def bench_steps(run: Run, rates: Rates) -> None:
    """Decode steps of one layer of gated delta net, in a page and at its end, and with drafts."""
    form = delta_form()
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
            took = graph_us(partial(step_delta, *given)) / 1e6
            roof = batch * 32 * 128 * 128 * 4 / rates.bytes_per_s
            row = {"tile": str(tile), "batch": batch, "behind": behind, "rows": count}
            run.row(row, table="steps", us=1e6 * took, share=roof / took)
    slot_states._TILES = chosen


def bench_prompt(run: Run, rates: Rates, *, beside: bool = False) -> None:
    """A prompt's rows through one layer's states; `beside`: by the kernels of fla-core."""
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
        with run.noted(name):
            took = median_s(call, 4)
            figures = {"kernel": f"fla-core: {name}" if beside else name, "rows": rows}
            share = work / rates.flop_per_s / took
            run.row(figures, table="prompts", ms=1e3 * took, share=share)


class Costs:
    """The least bytes and products of a model's steps.

    Args:
        llm: With the model.
    """

    def __init__(self, llm: LLM) -> None:
        info = llm.engine.info
        executor = llm.engine.parts.local
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


def bench_engine(run: Run, name: str, rates: Rates) -> None:
    """All measurements of one model that fit into the time."""
    options, began = run.options, time.perf_counter()
    profiled = options.profiled

    def has_time() -> bool:
        return time.perf_counter() - began < options.budget

    with tempfile.TemporaryDirectory() as folder:
        path = write_config(Path(folder), name)
        with LLM(path, **SETTINGS) as llm:
            print(*llm.engine.info.notices, sep="\n")
            gc.collect()
            gc.freeze()
            costs = Costs(llm)
            sizes = {"dense_gb": costs.dense / 1e9, "experts_gb": costs.experts / 1e9}
            sizes |= {"state_mb": costs.state_bytes / 1e6}
            run.row(table="weights", model=name, start_s=time.perf_counter() - began, **sizes)
            for batch in options.batches:
                if not has_time():
                    return
                run_batch(llm, batch, 512, 8)
                done = run_batch(llm, batch, 512, 64)
                if not done.num_steps:
                    run.note(f"{name}: there is no memory for {batch} requests at once")
                    continue
                took = done.seconds / done.num_steps
                least = costs.decode_seconds(rates, batch, 544)
                figures = {"batch": batch, "tokens_per_s": batch / took, "share": least / took}
                figures |= {"step_ms": 1e3 * took, "host_ms": 1e3 * statistics.median(done.host_s)}
                some = partial(run_batch, llm, batch, 32, 20)
                what = f"decode {batch}"
                kernels = told_kernels(some, what, 20) if batch in profiled else []
                run.row(table="decode", model=name, **figures, kernels=kernels)
            for length in (1024, 4096):
                if not has_time():
                    return
                times = [run_batch(llm, 8, length, 2).first_token_s for _ in range(3)]
                share = costs.prompt_seconds(rates, 8 * length) / min(times)
                rate = 8 * length / min(times)
                figures = {"tokens": length, "tokens_per_s": rate, "share": share}
                run.row(table="prompts, 8 at once", model=name, **figures)
            if profiled and has_time():
                some = partial(run_batch, llm, 8, 1024, 2)
                run.keep(**{f"{name} prompts": told_kernels(some, "prefill 8 x 1,024", 1)})
            limits = llm.engine.scheduler._limits
            llm.engine.scheduler._limits = limits._replace(max_step_tokens=options.step_rows[0])
            if profiled and options.requests and has_time():
                mixed = partial(run_batch, llm, 64, MANY_IN, 32)
                steps, took = 64 * MANY_IN / 2048, mixed().all_seconds
                what = f"64 of {MANY_IN}/32, {1e3 * took / steps:.1f} ms"
                run.keep(**{f"{name} mixed": told_kernels(mixed, what, int(steps))})
            for rows in options.step_rows if options.requests else ():
                if not has_time():
                    break
                llm.engine.scheduler._limits = limits._replace(max_step_tokens=rows)
                done = run_batch(llm, options.requests, MANY_IN, MANY_OUT)
                rate = options.requests * (MANY_IN + MANY_OUT) / done.all_seconds
                figures = {"requests": options.requests, "step_rows": rows, "tokens_per_s": rate}
                run.row(table=f"all of {MANY_IN}/{MANY_OUT}", model=name, **figures)
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


def bench_mtp(run: Run, name: str) -> None:
    """Decode with the checkpoint's MTP head, at forced acceptance lengths, and without."""
    began = time.perf_counter()
    for depth in run.options.depths:
        if time.perf_counter() - began > run.options.budget:
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
                    llm.engine.parts.local._model._target.lm_head.weight.data.zero_()  # type: ignore[attr-defined]
                    forced.right.fill_(run_batch(llm, 1, 64, 8).tokens[0][-1])
                    for batch in (1, 64):
                        before = llm.engine.counters()
                        run_batch(llm, batch, 512, 8)
                        done = run_batch(llm, batch, 512, 96)
                        after = llm.engine.counters()
                        drafted, accepted = (
                            after[count] - before[count]
                            for count in ("drafted_tokens", "accepted_tokens")
                        )
                        length = 1 + accepted * depth / max(1, drafted)
                        took = done.seconds / max(1, done.num_steps)
                        figures = {"drafts": depth, "batch": batch, "length": length}
                        figures |= {"tokens_per_s": batch * length / took, "step_ms": 1e3 * took}
                        run.row(table="MTP", model=name, **figures)
                        if batch in run.options.profiled:
                            told_kernels(partial(run_batch, llm, batch, 64, 40), "MTP", 20)
            del llm  # Two do not fit.
        finally:
            StaticChains.run = run_of  # type: ignore[method-assign]


@harness.part
def kernels(run: Run) -> None:
    """A layer's states alone."""
    rates = kept_rates(run)
    bench_steps(run, rates)
    bench_prompt(run, rates)


@harness.part_if_named
def beside(run: Run) -> None:
    """Prompts by fla-core's kernels."""
    bench_prompt(run, kept_rates(run), beside=True)


@harness.part
def engine(run: Run) -> None:
    """Whole models."""
    rates = kept_rates(run)
    for name in run.options.models:
        release()
        with run.noted(name):
            bench_engine(run, name, rates)


@harness.part_if_named
def mtp(run: Run) -> None:
    """Decode with drafts of which a forced number is accepted."""
    for name in run.options.models:
        release()
        with run.noted(f"{name} mtp"):
            bench_mtp(run, name)


if __name__ == "__main__":
    sys.exit(harness.main())
