"""Tries launch shapes of the adapters' kernels in whole layers, one kernel after the other.

python bench/tune_lora.py --warm 3/14       compiles its share of what is tried, and checks results
python bench/tune_lora.py                   times all, keeps the best of each kernel for the rest

Several of the first side by side before the second, which so finds all compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import gpu_lora_layers as layers
import torch
from clocks import graph_us
from harness import Harness, Run
from weft.engine.model.step import Step
from weft.kernels.ops.lora import triton_shrink as lora_shrink
from weft.kernels.ops.lora import triton_tiles as lora_tiles
from weft.kernels.ops.lora.gpu import Ranks
from weft.kernels.ops.lora.reference import add_lora_reference
from weft.kernels.ops.lora.spec import LoraAddition, LoraStep
from weft.kernels.ops.lora.triton_fold import MAX_FOLDED_ROWS, Folded
from weft.kernels.ops.lora.triton_shrink import shrink_tiles
from weft.kernels.ops.lora.triton_tiles import expand_tiles, expand_tiles_silu
from weft.kernels.ops.lora.triton_units import LoraLaunchConfig
from weft.kernels.ops.norm.triton_rms import add_rms_norm
from weft.kernels.shared.dependent_launch import launch_options
from weft.kernels.shared.side_stream import rehearsal

MIXES = ((8, 16), (32, 16), (8, 64))
"""Numbers of adapters, and their rank."""
harness = Harness(__file__, __doc__)
harness.flag("--warm", help="NUMBER/OF: a share of the shapes")
FEW, SOME, MANY = 64, 512, 4096
"""Rows: requests that decode, a step of prompts, and a long one."""
TRIED: dict[str, tuple[int, list[LoraLaunchConfig]]] = {
    "ahead": (
        FEW,
        [
            LoraLaunchConfig(512, 64, 8, sharers=2, registers=128),
            LoraLaunchConfig(512, 64, 8, sharers=2),
        ],
    ),
    "shrink 16": (
        FEW,
        [
            LoraLaunchConfig(64, 64, 4, stages=4),
            LoraLaunchConfig(128, 128, 8, stages=3),
        ],
    ),
    "expand 16": (
        FEW,
        [
            LoraLaunchConfig(32, 32, 2),
            LoraLaunchConfig(64, 64, 4),
            LoraLaunchConfig(64, 64, 8),
            LoraLaunchConfig(128, 32, 4),
            LoraLaunchConfig(128, 64, 4),
            LoraLaunchConfig(128, 64, 8),
            LoraLaunchConfig(64, 128, 4),
            LoraLaunchConfig(128, 128, 8),
        ],
    ),
    "silu 16": (
        FEW,
        [
            LoraLaunchConfig(64, 32, 4),
            LoraLaunchConfig(128, 32, 4),
            LoraLaunchConfig(64, 64, 4, registers=128),
            LoraLaunchConfig(128, 64, 4),
            LoraLaunchConfig(128, 64, 8, registers=128),
            LoraLaunchConfig(256, 64, 8),
            LoraLaunchConfig(64, 128, 4),
        ],
    ),
    "shrink 32": (
        SOME,
        [
            LoraLaunchConfig(64, 32, 4, sharers=2, stages=4),
            LoraLaunchConfig(64, 64, 4, stages=4),
            LoraLaunchConfig(128, 32, 4, stages=4),
            LoraLaunchConfig(128, 32, 4, sharers=4, stages=4),
            LoraLaunchConfig(128, 32, 8, sharers=2, stages=4),
            LoraLaunchConfig(128, 16, 4, sharers=4, stages=4),
        ],
    ),
    "expand 32": (
        SOME,
        [
            LoraLaunchConfig(64, 32, 4, registers=128),
            LoraLaunchConfig(64, 64, 4, registers=128),
            LoraLaunchConfig(128, 16, 4),
            LoraLaunchConfig(128, 32, 8),
            LoraLaunchConfig(128, 32, 4, blocks=4),
        ],
    ),
    "silu 32": (
        SOME,
        [
            LoraLaunchConfig(64, 16, 4, registers=168),
            LoraLaunchConfig(64, 32, 4, registers=168),
            LoraLaunchConfig(64, 32, 8, registers=128),
            LoraLaunchConfig(128, 16, 8, registers=128),
            LoraLaunchConfig(128, 64, 4, registers=128),
        ],
    ),
    "silu 64": (
        MANY,
        [
            LoraLaunchConfig(64, 64, 8, registers=128),
            LoraLaunchConfig(64, 32, 8, registers=128),
            LoraLaunchConfig(64, 32, 8, blocks=2, registers=128),
            LoraLaunchConfig(64, 32, 8, blocks=4, registers=128),
            LoraLaunchConfig(64, 32, 4),
            LoraLaunchConfig(64, 32, 4, blocks=2, registers=168),
            LoraLaunchConfig(64, 64, 4),
            LoraLaunchConfig(32, 32, 4, registers=128),
            LoraLaunchConfig(32, 32, 4, blocks=4, registers=128),
            LoraLaunchConfig(32, 64, 4, registers=128),
            LoraLaunchConfig(64, 16, 4, registers=168),
            LoraLaunchConfig(128, 32, 8),
        ],
    ),
    "expand 64": (
        MANY,
        [
            LoraLaunchConfig(128, 64, 8, registers=128),
            LoraLaunchConfig(128, 64, 8, blocks=2, registers=128),
            LoraLaunchConfig(128, 32, 8, registers=128),
            LoraLaunchConfig(128, 32, 8, blocks=2, registers=128),
            LoraLaunchConfig(64, 32, 4, registers=128),
            LoraLaunchConfig(64, 32, 4, blocks=2, registers=128),
            LoraLaunchConfig(64, 32, 4, blocks=4, registers=128),
            LoraLaunchConfig(64, 64, 4, registers=128),
            LoraLaunchConfig(64, 64, 4, registers=168),
            LoraLaunchConfig(128, 32, 4, registers=168),
            LoraLaunchConfig(128, 16, 8, registers=128),
        ],
    ),
    "shrink 64": (
        MANY,
        [
            LoraLaunchConfig(64, 64, 4, stages=4),
            LoraLaunchConfig(64, 64, 4, stages=6),
            LoraLaunchConfig(128, 64, 4, stages=3),
            LoraLaunchConfig(128, 64, 8, stages=3),
            LoraLaunchConfig(64, 32, 4, stages=4),
            LoraLaunchConfig(64, 32, 4, stages=6),
            LoraLaunchConfig(128, 32, 4, stages=4),
            LoraLaunchConfig(128, 64, 8, stages=4),
        ],
    ),
}


def put(kernel: str, shape: LoraLaunchConfig) -> LoraLaunchConfig:
    """Launches a kernel so from here on; returns how it was."""
    name, _, tile = kernel.partition(" ")
    if name == "ahead":
        before, lora_shrink.AHEAD = lora_shrink.AHEAD, shape
        return before
    tables = {
        "shrink": lora_shrink.SHAPES,
        "expand": lora_tiles.SHAPES,
        "silu": lora_tiles.SILU_LAUNCH_CONFIGS,
    }
    before = tables[name][int(tile)]
    tables[name][int(tile)] = shape
    return before


def products(kernel: str, rows: int, lora: LoraStep) -> Iterator[tuple[str, float]]:
    """Launches what is added to the products that a kernel is used for, and what is wrong with it.

    Yields the product and the relative error.
    """
    few = rows <= MAX_FOLDED_ROWS
    wanted = {"ahead": ("qkv", "o"), "silu": ("gate_up",), "expand": ("qkv",)}
    default = ("gate_up",) if few else ("qkv", "o", "gate_up", "down")
    for group in wanted.get(kernel.split()[0], default):
        added = lora.of(group, 0)  # type: ignore[arg-type]
        assert added is not None
        width = sum(part.out_features for part in added.parts)
        x = layers.numbers(rows, added.parts[0].in_features) * 64
        right = torch.zeros(rows, width, device="cuda")
        add_lora_reference(right, x, added)
        out, folded = torch.zeros_like(right).bfloat16(), None
        if group == "gate_up":
            out, folded, right = _activated(x, added, lora, few)
        else:
            is_folded = group == "o" and few
            ranks = Ranks(x, added, is_ahead=True, is_folded=is_folded)
            if is_folded:
                folded = ranks.folded()
            else:
                ranks.add_to(out)
        if folded is not None:
            down = group == "gate_up"
            if down:
                yield group, _error(out, right)
                right = torch.zeros(rows, layers.HIDDEN, device="cuda")
                to_down = lora.of("down", 0)
                assert to_down is not None
                add_lora_reference(right, out, to_down)
            out = torch.zeros_like(right).bfloat16()
            product = torch.zeros_like(out)
            add_rms_norm(product, out, torch.ones_like(out[0]), 1e-5, folded)
            group = "down" if down else group
        yield group, _error(out, right)


def _activated(
    x: torch.Tensor, added: LoraAddition, lora: LoraStep, few: bool
) -> tuple[torch.Tensor, Folded | None, torch.Tensor]:
    # Little beside what is added, so that errors show.
    both = (torch.randn(x.shape[0], 2 * layers.INNER, device="cuda") / 32).bfloat16()
    whole = both.to(torch.float32, copy=True)
    add_lora_reference(whole, x, added)
    gate, up = whole.chunk(2, -1)
    down = lora.of("down", 0) if few else None
    found = Ranks(x, added, down).silu_of(both)
    assert found is not None
    return *found, torch.nn.functional.silu(gate) * up


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    return ((found.float() - right).norm() / right.norm()).item()


def warm(number: int, of: int) -> None:
    """Compiles a share of the shapes and prints how far their results are from float32's."""
    jobs = [(kernel, shape) for kernel, (_, shapes) in TRIED.items() for shape in shapes]
    for kernel, shape in jobs[number::of]:
        rows = TRIED[kernel][0]
        before = put(kernel, shape)
        for count, rank in MIXES:
            lora = layers.adapters_of(rows, count, rank, are_sorted=rows > FEW)
            with torch.inference_mode(), rehearsal():
                for group, error in products(kernel, rows, lora):
                    wrong = "" if error < 0.01 else "  WRONG"
                    if wrong or (count, rank) == MIXES[0]:
                        mix = f"{count} x {rank}"
                        print(f"{kernel} {shape} {mix} {group}: {error:.5f}{wrong}", flush=True)
        put(kernel, before)


def each_alone(kernel: str, rows: int, loras: Sequence[LoraStep]) -> list[float]:
    """Times `alone` for each mix."""
    return [alone(kernel, rows, lora) for lora in loras]


def alone(kernel: str, rows: int, lora: LoraStep) -> float:
    """Microseconds of a layer's launches of a kernel by itself."""
    options = launch_options(torch.device("cuda"), is_alone=True)
    name = kernel.split()[0]
    launches: list[Callable[[], object]] = []
    wanted = {"silu": ("gate_up",), "expand": ("qkv", "o", "down")}
    for group in wanted.get(name, ("qkv", "o", "gate_up", "down")):
        for layer in range(layers.LAYERS):
            added = lora.of(group, layer)  # type: ignore[arg-type]
            assert added is not None
            x = layers.numbers(rows, added.parts[0].in_features)
            if name == "shrink":
                launches.append(partial(shrink_tiles, x, added, options))
                continue
            out = layers.numbers(rows, sum(part.out_features for part in added.parts))
            ranks = shrink_tiles(x, added, options)
            if name == "silu":
                launches.append(partial(expand_tiles_silu, out, ranks, added, options))
            else:
                launches.append(partial(expand_tiles, out, ranks, added, options))
    return graph_us(launches) * len(launches) / layers.LAYERS


def tune() -> None:
    """Times each shape, of few rows in whole layers; the best is kept.

    Whole layers of many rows differ by more from one run to the next.
    """
    for rows in (FEW, SOME, MANY):
        q_len, kv_len = (512, 512) if rows > FEW else (1, 640)
        plain = layers.step_of(rows, q_len, kv_len, None)
        loras = [layers.adapters_of(rows, *mix, are_sorted=rows > FEW) for mix in MIXES]
        steps = [replace(plain, lora=lora) for lora in loras]

        def whole(steps: list[Step] = steps, rows: int = rows) -> list[float]:
            return [layers.Graph(step, rows).us(12) for step in steps]

        print(f"{rows} rows without adapters: {layers.Graph(plain, rows).us():.1f}", flush=True)
        print(f"{rows} rows as it is: " + " ".join(f"{us:8.1f}" for us in whole()), flush=True)
        for kernel, (used, shapes) in TRIED.items():
            if used == rows:
                each = partial(each_alone, kernel, rows, loras)
                tune_one(kernel, shapes, whole if rows == FEW else each)
        print(f"{rows} rows, best: " + " ".join(f"{us:8.1f}" for us in whole()), flush=True)
        layers.Graph(steps[0], rows).timeline()


def tune_one(
    kernel: str, shapes: list[LoraLaunchConfig], measure: Callable[[], list[float]]
) -> None:
    """Times the shape that a kernel has, and others; the best is kept."""
    best = measure()
    print(f"{kernel:10} " + " ".join(f"{us:8.1f}" for us in best) + " as it is", flush=True)
    for shape in shapes:
        before, found = put(kernel, shape), measure()
        is_better = sum(found) + found[0] < sum(best) + best[0]
        times = " ".join(f"{us:8.1f}" for us in found)
        print(f"{kernel:10} {times} {shape}{' *' if is_better else ''}", flush=True)
        if is_better:
            best = found
        else:
            put(kernel, before)


@harness.part
def lora(run: Run) -> None:
    """Compiles a share of the shapes, or times all."""
    if run.options.warm:
        number, of = run.options.warm.split("/")
        warm(int(number), int(of))
    else:
        tune()


if __name__ == "__main__":
    sys.exit(harness.main())
