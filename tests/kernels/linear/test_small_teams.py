"""Operations on a CPU whose team of threads is smaller than they asked for."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from weft.kernels.shared import cpu

SCRIPT = """
import torch
from weft.kernels.shared import cpu
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.moe import moe, route
from weft.kernels.ops.moe.pack import pack_experts
from weft.kernels.ops.moe.reference import moe_reference

torch.set_num_threads(4)
assert cpu.native_cpu() is not None
rows, hidden, width, count = 48, 128, 160, 6
experts = [
    (torch.randn(2 * width, hidden) / 16, torch.randn(hidden, width) / 16) for _ in range(count)
]
x, logits = torch.randn(rows, hidden), torch.randn(rows, count)
for _ in range(3):
    junk = [torch.full((rows * 8, width), float("nan")) for _ in range(8)]  # new memory is not zero
    del junk
    routed, packed = route(logits, 2, renormalise=True), pack_experts(experts, count)
    torch.testing.assert_close(moe(x, routed, packed), moe_reference(x, routed, packed))
weight = torch.randn(700, hidden) / 16
packed = pack_linear(weight)
torch.testing.assert_close(linear(x, packed), x @ weight.T, rtol=1e-4, atol=1e-4)
"""


def test_a_team_may_be_smaller_than_asked_for() -> None:
    """As by OMP_THREAD_LIMIT, or OMP_DYNAMIC on a busy machine."""
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    environment = {**os.environ, "OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": "4"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
