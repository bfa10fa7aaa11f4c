"""Finds the tiles that multiply the experts of a model fastest on this GPU, and writes the table.

    python bench/tune_moe.py [--out kernels/weft/kernels/ops/moe/tiles.json]

For each row count blocks of several sizes are tried; for each size the tiles of the first product,
then, with the best of these, those of the second. Times are medians of graph replays of the whole
operation; kernels are compiled by several processes before.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from clocks import graph_us
from harness import Harness, Run
from weft.kernels.ops.moe.gpu import sorted_moe
from weft.kernels.ops.moe.tiles import Tile, Tiles, as_json, default_tiles
from weft.kernels.ops.moe.triton_route import route

SHAPES = {"qwen3-30b-a3b": {"top_k": 8, "experts": 128, "hidden": 2048, "width": 768}}
ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COMPILERS = 16

harness = Harness(__file__, __doc__)
harness.flag("--out", type=Path, required=True, help="the table that the kernels read")
harness.flag("--rows", type=int, nargs="+", default=ROWS, help="row counts to measure")
harness.flag("--part", type=int, help=argparse.SUPPRESS)


def tiles_of(rows: int, *, is_up: bool) -> list[Tile]:
    """Tile shapes to try for blocks of this many pairs."""
    tried = [
        Tile(columns, depth, warps, stages)
        for columns, depth, warps, stages in itertools.product(
            (64, 128, 256), (64, 128), (4, 8), (2, 3, 4)
        )
    ]
    # What a multiprocessor's shared memory holds, and the registers that sums lie in.
    parts = 2 if is_up else 1
    return [
        t
        for t in tried
        if (parts * t.columns + rows) * t.depth * 2 * t.stages <= 220 << 10
        and parts * rows * t.columns <= 128 * 32 * t.warps
    ]


def blocks_of(rows: int, shape: dict[str, int]) -> list[int]:
    """Block sizes tried for so many rows."""
    usual = default_tiles(rows * shape["top_k"], shape["experts"]).rows
    return [size for size in (16, 32, 64, 128) if usual / 2 <= size <= usual * 2]


class Case:
    """Random weights of a layer's experts, and rows for them."""

    def __init__(self, shape: dict[str, int], rows: int) -> None:
        hidden, width, experts = shape["hidden"], shape["width"], shape["experts"]
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.w13 = torch.randn((experts, 2 * width, hidden), **options) * 0.02
        self.w2 = torch.randn((experts, hidden, width), **options) * 0.02
        self.shape = shape
        self.set_rows(rows)

    def set_rows(self, rows: int) -> None:
        """Draws another set of rows."""
        hidden, experts = self.shape["hidden"], self.shape["experts"]
        self.x = torch.randn((rows, hidden), dtype=torch.bfloat16, device="cuda")
        self.residual = torch.randn_like(self.x)
        logits = torch.randn((rows, experts), device="cuda")
        self.ids, self.shares = route(logits, self.shape["top_k"], True)

    def run(self, tiles: Tiles) -> torch.Tensor:
        """Runs the operation."""
        call = (self.x, self.ids, self.shares, self.w13, self.w2, self.residual, tiles)
        return sorted_moe(*call)


def median_us(call: Callable[[], object]) -> float:
    """Microseconds of a call in a graph; infinite where the tiles do not fit the device."""
    try:
        return graph_us(call, 5)
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def all_tiles(counts: Sequence[int], shape: dict[str, int]) -> Iterator[Tiles]:
    """Every block size with every tile of each product."""
    for size in sorted({size for rows in counts for size in blocks_of(rows, shape)}):
        ups, downs = (tiles_of(size, is_up=is_up) for is_up in (True, False))
        for up, down in itertools.zip_longest(ups, downs):
            yield Tiles(size, up or ups[0], down or downs[0])


def compile_part(shape: dict[str, int], counts: Sequence[int], part: int) -> None:
    """Compiles one of every `COMPILERS` combinations into Triton's cache."""
    case = Case(shape, 64)
    for tiles in itertools.islice(all_tiles(counts, shape), part, None, COMPILERS):
        try:
            case.run(tiles)
        except triton.runtime.errors.OutOfResources:
            continue
    torch.cuda.synchronize()


def tune(run: Run, shape: dict[str, int], counts: Sequence[int]) -> dict[str, Any]:
    """The best tiles by row count."""
    case = Case(shape, 64)
    found: dict[str, Any] = {}
    for rows in counts:
        case.set_rows(rows)
        usual = default_tiles(rows * shape["top_k"], shape["experts"])
        before = median_us(lambda usual=usual: case.run(usual))
        best, best_us = usual, before
        for size in blocks_of(rows, shape):
            up, down = (tiles_of(size, is_up=is_up)[0] for is_up in (True, False))
            for is_up in (True, False):
                timed = []
                for tile in tiles_of(size, is_up=is_up):
                    tiles = Tiles(size, tile, down) if is_up else Tiles(size, up, tile)
                    timed.append((median_us(lambda tiles=tiles: case.run(tiles)), tiles))
                us, tiles = min(timed)
                up, down = tiles.up, tiles.down
                if us < best_us:
                    best, best_us = tiles, us
        exact = case.run(usual).double()
        error = (case.run(best).double() - exact).norm() / exact.norm()
        assert error < 1e-2, f"{best}: off by {error:.3g}"
        flops = 6.0 * rows * shape["top_k"] * shape["hidden"] * shape["width"]
        figures = {"default_us": before, "us": best_us, "tflop_s": flops / best_us / 1e6}
        run.row({"rows": rows} | figures, tiles=str(best))
        found[str(rows)] = as_json(best) | {"us": round(best_us, 1)}
    return found


@harness.part
def moe(run: Run) -> None:
    """Compiles, tunes, writes."""
    options = run.options
    if options.part is not None:
        for shape in SHAPES.values():
            compile_part(shape, options.rows, options.part)
        return
    rows = [str(count) for count in options.rows]
    command = [sys.executable, __file__, "--out", os.devnull, "--rows", *rows, "--part"]
    compiling = [subprocess.Popen([*command, str(part)]) for part in range(COMPILERS)]
    codes = [process.wait() for process in compiling]
    assert not any(codes), codes
    shapes = [
        {"model": name, **shape, "tiles": tune(run, shape, options.rows)}
        for name, shape in SHAPES.items()
    ]
    about = {"date": run.setup["date"][:10], "device": torch.cuda.get_device_name()}
    about |= {"torch": torch.__version__, "triton": triton.__version__}
    options.out.write_text(json.dumps({**about, "shapes": shapes}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(harness.main())
