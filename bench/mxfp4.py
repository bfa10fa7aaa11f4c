"""Experts of gpt-oss's sizes in MXFP4 and in NVFP4, as checkpoints have them, beside bfloat16.

All forms are multiplied in turns. On a CPU one thread does it, and its processor time counts; on a
GPU a captured graph of several products does. The gate and up projections of each expert are
[2 * 2880, 2880] and its down projection [2880, 2880]; each row chooses 4 of 32 experts. The forms
have other numbers of the same sizes.

    python bench/mxfp4.py
    python bench/mxfp4.py --device cuda
    python bench/mxfp4.py --only launches --device cuda --rows 8 16 32

The part `launches` compares forms of the sorted product on a GPU, in blocks of 8 and 16 pairs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import torch
from harness import Harness, Run, ratio_of, spread, timed
from weft.kernels.ops.linear.triton_groups_product import (
    GroupsLaunchConfig,
    product_launch_config,
)
from weft.kernels.ops.moe import gpu, moe, triton_products
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import ExpertWeights, Routing
from weft.kernels.ops.moe.tiles import Tiles, packed_tiles
from weft.kernels.shared.formats.int_groups import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    IntGroups,
    mxfp4_groups,
    nvfp4_groups,
)

EXPERTS, TOP_K, SIZE = 32, 4, 2880
BFLOAT16 = torch.bfloat16
IN_A_GRAPH = 20


def draw_mxfp4(rows: int, columns: int, device: str) -> IntGroups:
    """Random numbers with scales about 2^-8."""
    groups, at = columns // MXFP4_GROUP, {"dtype": torch.uint8, "device": device}
    blocks = torch.randint(0, 256, (rows, groups, MXFP4_GROUP // 2), **at)
    return mxfp4_groups(blocks, torch.randint(117, 121, (rows, groups), **at))


def draw_nvfp4(rows: int, columns: int, device: str) -> IntGroups:
    """Random numbers with scales about 2^-8."""
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=device)
    scales = torch.rand((rows, columns // NVFP4_GROUP), device=device) + 0.5
    factors = torch.full((rows,), 2.0**-8, device=device)
    return nvfp4_groups(data, scales.to(torch.float8_e4m3fn), factors)


def draw_floats(rows: int, columns: int, device: str) -> torch.Tensor:
    return (torch.randn(rows, columns, device=device) * 0.02).to(BFLOAT16)


def drawn_experts(
    draw: Callable[[int, int, str], IntGroups | torch.Tensor], device: str
) -> ExpertWeights:
    pairs = ((draw(2 * SIZE, SIZE, device), draw(SIZE, SIZE, device)) for _ in range(EXPERTS))
    return pack_experts(pairs, EXPERTS, None, BFLOAT16)


def gpu_timer(step: Callable[[], object]) -> Callable[[], float]:
    """Seconds of one of the steps of a captured graph."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            step()

    def measured() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / IN_A_GRAPH

    return measured


harness = Harness(__file__, __doc__, repeats=15)
harness.flag("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
harness.flag("--device", default="cpu")


@harness.part
def mxfp4(run: Run) -> None:
    """All numbers of rows."""
    device = run.options.device
    torch.set_num_threads(1)
    forms = {
        "mxfp4": drawn_experts(draw_mxfp4, device),
        "nvfp4": drawn_experts(draw_nvfp4, device),
        "bfloat16": drawn_experts(draw_floats, device),
    }
    for rows in run.options.rows:
        x = torch.randn(rows, SIZE, dtype=BFLOAT16, device=device)
        ids = torch.rand(rows, EXPERTS, device=device).topk(TOP_K).indices.sort().values
        routing = Routing(ids.int(), torch.rand(rows, TOP_K, device=device))
        steps = {name: partial(moe, x, routing, weights) for name, weights in forms.items()}
        if device == "cpu":
            timers = {name: partial(timed, step, time.thread_time) for name, step in steps.items()}
        else:
            timers = {name: gpu_timer(step) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in forms}
        for turn in range(run.options.repeats + 1):
            for name, timer in timers.items():
                seconds = timer()
                if turn:  # The first one warms up.
                    times[name].append(seconds)
        figures = {f"{name}_ms": spread(taken, 1e3) for name, taken in times.items()}
        run.row(
            {"rows": rows} | figures,
            times_faster=ratio_of(times["bfloat16"], times["mxfp4"]),
            nvfp4_times_faster=ratio_of(times["bfloat16"], times["nvfp4"]),
            nvfp4_beside_mxfp4=ratio_of(times["mxfp4"], times["nvfp4"]),
        )


LAUNCHES = {
    "sliced 8x32": GroupsLaunchConfig(8, 32, 4, 4, 4),
    "sliced 8x16": GroupsLaunchConfig(8, 16, 4, 4, 6),
    "sliced 8x64": GroupsLaunchConfig(8, 64, 4, 4, 3),
    "tiled 8x64": GroupsLaunchConfig(8, 64, 0, 4, 4),
    "tiled 8x128": GroupsLaunchConfig(8, 128, 0, 4, 3),
    "tiled 16x64": GroupsLaunchConfig(16, 64, 0, 4, 4),
    "tiled 16x128": GroupsLaunchConfig(16, 128, 0, 4, 3),
}


@harness.part_if_named
def launches(run: Run) -> None:
    """The forms of the sorted product, for all experts of MXFP4 and of NVFP4."""
    if run.options.device == "cpu":
        raise ValueError("launches are compared on a GPU: give --device cuda")
    formats = {
        "mxfp4": drawn_experts(draw_mxfp4, run.options.device),
        "nvfp4": drawn_experts(draw_nvfp4, run.options.device),
    }
    for rows in run.options.rows:
        x = torch.randn(rows, SIZE, dtype=BFLOAT16, device=run.options.device)
        ids = torch.rand(rows, EXPERTS, device=x.device).topk(TOP_K).indices.sort().values
        routing = Routing(ids.int(), torch.rand(rows, TOP_K, device=x.device))
        for form, weights in formats.items():
            step = partial(moe, x, routing, weights)
            timers = {"chosen": gpu_timer(step)}
            for name, launch in LAUNCHES.items():
                with _launched_as(launch):
                    timers[name] = gpu_timer(step)
            times: dict[str, list[float]] = {name: [] for name in timers}
            for turn in range(run.options.repeats + 1):
                for name, timer in timers.items():
                    seconds = timer()
                    if turn:  # The first one warms up.
                        times[name].append(seconds)
            run.row(
                {"rows": rows, "format": form}
                | {name: spread(taken, 1e6) for name, taken in times.items()}
            )


@contextmanager
def _launched_as(launch: GroupsLaunchConfig) -> Iterator[None]:
    """Within the context, sorted products have blocks of the launch's rows, and its form."""

    def chosen(*_: object, **__: object) -> GroupsLaunchConfig:
        return launch

    def tiles(pairs: int, experts: int, **more: bool) -> Tiles:
        return packed_tiles(pairs, experts, **more)._replace(rows=launch.rows)

    with (
        patch.object(triton_products, product_launch_config.__name__, chosen),
        patch.object(gpu, packed_tiles.__name__, tiles),
    ):
        yield


if __name__ == "__main__":
    sys.exit(harness.main())
