"""The launches of a layer's experts, each beside the time of reading the chosen experts once.

A graph of calls over layers that rotate beyond the L2 cache is profiled; each row is a kernel's
mean time a call. The roof is that of the bytes of the experts that the rows chose, once, and the
rows `all` compare the graph's own time with it. A router is part of a call, its product is not.

    python bench/gpu_expert_launches.py                               Qwen3-30B-A3B, all formats
    python bench/gpu_expert_launches.py --model deepseek-v3 --formats fp8 --rows 1,16,64,256
    python bench/gpu_expert_launches.py --only forms --formats bf16 fp8 --rows 1,2,3,4,6,8,12,16

`forms` (only if named) computes layers of floats and FP8 in other forms too, all in turns: unsorted
pairs, sorted ones from the first row on, and sorted ones whose rows are rounded to FP8, with other
launches too. The layer's input is rounded before, as by its norm.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, islice
from typing import Any
from unittest.mock import patch

import torch
from clocks import capture, graph_us, num_inputs, replay_us
from gpu_fp8 import quantise_blocks
from gpu_quantised import Format, Product, draw_experts
from gpu_roof import kept_rates
from harness import Harness, Run, numbers, spread
from torch.profiler import ProfilerActivity, profile
from weft.kernels.ops.linear.triton_fp8_rows import quantise_rows
from weft.kernels.ops.moe import gpu, triton_rounded, triton_route
from weft.kernels.ops.moe.gpu import routed_moe
from weft.kernels.ops.moe.spec import StackedWeight
from weft.kernels.ops.moe.tiles import Tile, Tiles
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.shared.formats.quantised import Fp8Experts

SHAPES = {
    "qwen3-30b": (128, 2048, 768, 8),
    "qwen3-235b": (64, 4096, 1536, 8),
    "deepseek-v3": (32, 7168, 2048, 8),
    "gpt-oss": (32, 2880, 2880, 4),
}
"""Experts of a rank, H, I and experts of a row: whole layers, but for quarters of Qwen3-235B's on
two cards and eighths of DeepSeek-V3's.
"""
PACKED: dict[str, Format] = {"int4": "int4", "mxfp4": "mxfp4"}
FORMATS = ("bf16", "fp8", *PACKED)
BITS = {"bf16": 16.0, "fp8": 8.0 + 32 / 128 / 128, "int4": 4.0 + 16 / 128, "mxfp4": 4.0 + 8 / 32}
"""Bits of a weight with its share of scales."""
_PROFILED = 5
"""Replays that are profiled."""

Replaced = list[tuple[Any, str, object]]
_UNSORTED = (gpu, "MAX_DIRECT_FP8_ROWS", 16)


def _rounded(
    rows: int, first: Tile, second: Tile, is_copied: tuple[bool, bool] | None = None
) -> Replaced:
    tiles = Tiles(rows, first, second, is_rounded=True)
    replaced: Replaced = [(gpu, "rounded_tiles", lambda pairs, experts: tiles)]
    if is_copied is not None:
        replaced.append((triton_rounded, "IS_COPIED", is_copied))
    return [(gpu, "MAX_DIRECT_FP8_ROWS", 0), *replaced]


_WIDE = Tile(128, 128, 8, 3), Tile(128, 128, 8, 4)
FP8_FORMS: dict[str, Replaced] = {
    "chosen": [],
    "not rounded, or in blocks of 64": [(gpu, "rounded_tiles", lambda pairs, experts: None)],
    "unsorted": [_UNSORTED],
    "rounded, 16": _rounded(16, *_WIDE),
    "rounded, 16, 4 warps": _rounded(16, Tile(128, 128, 4, 3), Tile(128, 128, 4, 4)),
    "rounded, 16, 2 stages": _rounded(16, Tile(128, 128, 8, 2), Tile(128, 128, 8, 3)),
    "rounded, 16, 64 columns": _rounded(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 5)),
    "rounded, 16, 64 columns of down": _rounded(16, _WIDE[0], Tile(64, 128, 4, 6)),
    "rounded, 16, not copied": _rounded(16, *_WIDE, (False, False)),
    "rounded, 16, sorted at once": [
        *_rounded(16, *_WIDE),
        (triton_route, "_MAX_AT_ONCE", 1 << 13),
    ],
    "rounded, 32": _rounded(32, *_WIDE),
    "rounded, 32, 64 columns": _rounded(32, Tile(64, 128, 4, 4), Tile(64, 128, 4, 4)),
    "rounded, 64": _rounded(64, Tile(64, 128, 4, 3), Tile(128, 128, 8, 3)),
}
"""What of the operation is replaced."""
FLOAT_FORMS: dict[str, Replaced] = {
    "chosen": [],
    "unsorted": [(gpu, "MAX_DIRECT_ROWS", 16)],
    "sorted": [(gpu, "MAX_DIRECT_ROWS", 0)],
}
FORMS = {"fp8": FP8_FORMS, "bf16": FLOAT_FORMS}
_TURNS = 9

harness = Harness(__file__, __doc__)
harness.flag("--model", choices=SHAPES, default="qwen3-30b", help="whose layer")
harness.flag("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of weights")
harness.flag("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512], help="T")


def draw_layer(
    name: str, experts: int, hidden: int, inner: int
) -> tuple[StackedWeight, StackedWeight]:
    shapes = (2 * inner, hidden), (hidden, inner)
    first, second = (_draw(name, experts, *shape) for shape in shapes)
    return first, second


def _draw(name: str, experts: int, rows: int, columns: int) -> StackedWeight:
    if name in PACKED:
        is_gated = rows != columns and rows % 2 == 0
        return draw_experts(Product("experts", rows, columns, is_gated), experts, PACKED[name])
    if name == "bf16":
        floats = torch.randn(experts, rows, columns, device="cuda", dtype=torch.bfloat16)
        return floats.mul_(0.02)
    one = quantise_blocks(torch.randn(rows, columns, device="cuda") * 0.02)
    stack = Fp8Experts.empty(experts, one)
    for expert in range(experts):
        stack.put(expert, one)
    return stack


def kernel_times(graph: torch.cuda.CUDAGraph, calls: int) -> dict[str, tuple[float, float]]:
    """Microseconds and launches a call of each kernel, by its name."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(_PROFILED):
            graph.replay()
        torch.cuda.synchronize()
    total = calls * _PROFILED
    times: dict[str, tuple[float, float]] = {}
    for event in found.key_averages():
        name = re.sub(r"[^A-Za-z_].*", "", event.key) or event.key[:40]
        us, count = times.get(name, (0.0, 0.0))
        times[name] = us + event.device_time_total / total, count + event.count / total
    return times


@harness.part
def launches(run: Run) -> None:
    """All formats and numbers of rows."""
    experts, hidden, inner, top_k = SHAPES[run.options.model]
    rates = kept_rates(run)
    for name in run.options.formats:
        each = BITS[name] / 8 * 3 * hidden * inner
        layers = [
            draw_layer(name, experts, hidden, inner) for _ in range(num_inputs(round(each * top_k)))
        ][:8]
        for rows in run.options.rows:
            with run.noted(f"{name}, {rows} rows"):
                _time(run, name, layers, rows, top_k, each, rates.bytes_per_s)
        del layers
        torch.cuda.empty_cache()


@harness.part_if_named
def forms(run: Run) -> None:
    """Layers in each of `FORMS`."""
    experts, hidden, inner, top_k = SHAPES[run.options.model]
    rates = kept_rates(run)
    for name in (one for one in FORMS if one in run.options.formats):
        each = BITS[name] / 8 * 3 * hidden * inner
        count = num_inputs(round(each * top_k))
        layers = [draw_layer(name, experts, hidden, inner) for _ in range(count)][:8]
        for rows in run.options.rows:
            calls, roof_us = _calls(layers, rows, top_k, each, rates.bytes_per_s)
            _time_forms(run, f"{name}, {rows} rows", FORMS[name], calls, rows, roof_us)
        del layers, calls
        torch.cuda.empty_cache()


def _time_forms(
    run: Run,
    table: str,
    forms_of: dict[str, Replaced],
    calls: list[Callable[[], object]],
    rows: int,
    roof_us: float,
) -> None:
    graphs = {}
    for name, replaced in forms_of.items():
        if name.startswith("unsorted") and rows > 16:
            continue
        with run.noted(f"{name}, {table}"), ExitStack() as stack:
            for place, attribute, value in replaced:
                stack.enter_context(patch.object(place, attribute, value))
            graphs[name] = capture(calls)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(_TURNS):
        for name, graph in graphs.items():
            times[name].append(replay_us(*graph))
    for name, found in times.items():
        us = spread(found)
        run.row(table=table, form=name, us=us, share=roof_us / us.median)


def _time(
    run: Run,
    name: str,
    layers: Sequence[tuple[StackedWeight, StackedWeight]],
    rows: int,
    top_k: int,
    expert_bytes: float,
    bytes_per_s: float,
) -> None:
    calls, roof_us = _calls(layers, rows, top_k, expert_bytes, bytes_per_s)
    us = graph_us(calls)
    graph, number = capture(calls)
    table = f"{run.options.model} {name}"
    for kernel, (its_us, count) in kernel_times(graph, number).items():
        run.row(table=table, rows=rows, launch=kernel, us=its_us, launches=count)
    run.row(table=table, rows=rows, launch="all", us=us, roof_us=roof_us, share=roof_us / us)


def _calls(
    layers: Sequence[tuple[StackedWeight, StackedWeight]],
    rows: int,
    top_k: int,
    expert_bytes: float,
    bytes_per_s: float,
) -> tuple[list[Callable[[], object]], float]:
    """Calls with different routes, and the microseconds of their roof."""
    experts, hidden, _ = layers[0][1].shape
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    after = NormAfter(torch.zeros_like(x), torch.ones_like(x[0]), 1e-6)
    scores = [torch.randn(rows, experts, device="cuda") for _ in range(12)]
    is_fp8 = isinstance(layers[0][0], Fp8Experts) and rows > 2
    rounded = quantise_rows(x, has_groups=True) if is_fp8 else None
    chosen = [len(one.topk(top_k).indices.unique()) for one in scores]
    roof_us = 1e6 * expert_bytes * sum(chosen) / len(chosen) / bytes_per_s
    calls: list[Callable[[], object]] = [
        partial(routed_moe, x, logits, top_k, *weights, after, renormalise=True, rounded=rounded)
        for logits, weights in zip(scores, islice(cycle(layers), len(scores)), strict=True)
    ]
    return calls, roof_us


if __name__ == "__main__":
    sys.exit(harness.main())
