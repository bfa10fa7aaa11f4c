"""Experts of gpt-oss's sizes on a CPU: in MXFP4, as checkpoints have them, beside bfloat16.

One thread multiplies in turns with both forms of the same numbers; its processor time counts. The
gate and up projections of each expert are [2 * 2880, 2880] and its down projection [2880, 2880];
each row chooses 4 of 32 experts.

    python bench/mxfp4.py
"""

from __future__ import annotations

import sys
import time
from functools import partial

import torch
from harness import Harness, Run, ratio_of, spread, timed
from weft.kernels.ops.moe import moe
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.spec import Routing
from weft.kernels.shared.formats.int_groups import MXFP4_GROUP, IntGroups, mxfp4_groups

EXPERTS, TOP_K, SIZE = 32, 4, 2880


def draw_matrix(rows: int, columns: int) -> IntGroups:
    """Random numbers with scales about 2^-8."""
    groups = columns // MXFP4_GROUP
    blocks = torch.randint(0, 256, (rows, groups, MXFP4_GROUP // 2), dtype=torch.uint8)
    return mxfp4_groups(blocks, torch.randint(117, 121, (rows, groups), dtype=torch.uint8))


harness = Harness(__file__, __doc__, repeats=15)
harness.flag("--rows", type=int, nargs="+", default=[1, 4, 16, 128])


@harness.part
def mxfp4(run: Run) -> None:
    """All numbers of rows."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16
    matrices = [(draw_matrix(2 * SIZE, SIZE), draw_matrix(SIZE, SIZE)) for _ in range(EXPERTS)]
    packed = pack_experts(matrices, EXPERTS, None, dtype)
    floats = pack_experts(
        ((up.dequantised(dtype), down.dequantised(dtype)) for up, down in matrices),
        EXPERTS,
        None,
        dtype,
    )
    for rows in run.options.rows:
        own, plain = list[float](), list[float]()
        for turn in range(run.options.repeats + 1):
            x = torch.randn(rows, SIZE, dtype=dtype)
            ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.sort().values
            routing = Routing(ids.int(), torch.rand(rows, TOP_K))
            for times, weights in ((own, packed), (plain, floats)):
                seconds = timed(partial(moe, x, routing, weights), time.thread_time)
                if turn:  # The first one warms up.
                    times.append(seconds)
        figures = {"mxfp4_ms": spread(own, 1e3), "bfloat16_ms": spread(plain, 1e3)}
        run.row({"rows": rows} | figures, times_faster=ratio_of(plain, own))


if __name__ == "__main__":
    sys.exit(harness.main())
