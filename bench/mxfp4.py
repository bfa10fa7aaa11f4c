"""Experts of gpt-oss's sizes on a CPU: in MXFP4, as checkpoints have them, beside bfloat16.

One thread multiplies in turns with both forms of the same numbers; its processor time counts. The
gate and up projections of each expert are [2 * 2880, 2880] and its down projection [2880, 2880];
each row chooses 4 of 32 experts.

    python bench/mxfp4.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from serving.setup import describe_lines, describe_setup
from weft.kernels.int_groups import MXFP4_GROUP, IntGroups, mxfp4_groups
from weft.kernels.moe import ExpertWeights, Routing, moe, pack_experts

EXPERTS, TOP_K, SIZE = 32, 4, 2880


def draw_matrix(rows: int, columns: int) -> IntGroups:
    """Random numbers with scales about 2^-8."""
    groups = columns // MXFP4_GROUP
    blocks = torch.randint(0, 256, (rows, groups, MXFP4_GROUP // 2), dtype=torch.uint8)
    return mxfp4_groups(blocks, torch.randint(117, 121, (rows, groups), dtype=torch.uint8))


def milliseconds(x: torch.Tensor, routing: Routing, experts: ExpertWeights) -> float:
    """Processor time of one call."""
    begin = time.thread_time()
    moe(x, routing, experts)
    return (time.thread_time() - begin) * 1e3


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 128])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console, dtype = Console(width=120), torch.bfloat16
    matrices = [(draw_matrix(2 * SIZE, SIZE), draw_matrix(SIZE, SIZE)) for _ in range(EXPERTS)]
    packed = pack_experts(matrices, EXPERTS, None, dtype)
    floats = pack_experts(
        ((up.dequantised(dtype), down.dequantised(dtype)) for up, down in matrices),
        EXPERTS,
        None,
        dtype,
    )
    table = Table("rows", "MXFP4, ms", "bfloat16, ms", "ratio", "lowest, highest of the pairs")
    for rows in arguments.rows:
        pairs = []
        for turn in range(arguments.turns + 1):
            x = torch.randn(rows, SIZE, dtype=dtype)
            ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.sort().values
            routing = Routing(ids.int(), torch.rand(rows, TOP_K))
            pair = milliseconds(x, routing, packed), milliseconds(x, routing, floats)
            if turn:  # The first one warms up.
                pairs.append(pair)
        ratios = sorted(plain / own for own, plain in pairs)
        own, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
        spread = f"{ratios[0]:.2f}, {ratios[-1]:.2f}"
        ratio = f"{statistics.median(ratios):.2f}x"
        table.add_row(str(rows), f"{own:.1f}", f"{plain:.1f}", ratio, spread)
    for line in describe_lines(describe_setup("experts in MXFP4 / bfloat16", 1)):
        console.print(line)
    console.print(table)


if __name__ == "__main__":
    main()
