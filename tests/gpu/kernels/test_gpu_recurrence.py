"""Recurrent operations on a GPU in the shapes of models: by chunks against float64, and steps of
gated delta nets against those of any layer with heads.
"""

from __future__ import annotations

import pytest
import torch
from weft.kernels.ops.gated_delta import delta_gates, gated_delta
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.mamba2 import mamba2, mamba2_reference
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.slot_states import plan_slots, step_delta, step_heads
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory

pytestmark = pytest.mark.needs("cuda")

CU_LENS = torch.tensor([0, 3, 700, 1000])
ROWS = 1000


def close(made: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    for mine, wanted in zip(made, expected, strict=True):
        bound = 2**-6 * float(wanted.abs().max())
        torch.testing.assert_close(mine.double(), wanted, rtol=0.0, atol=bound)


@pytest.mark.parametrize(("by_element", "heads"), [(False, 8), (False, 96), (True, 8)])
def test_gated_delta(by_element: bool, heads: int) -> None:
    """With so many heads that programs take more values, too."""
    q, k = torch.randn(2, ROWS, heads // 2, 128, device="cuda").bfloat16()
    v = torch.randn(ROWS, heads, 128, device="cuda").bfloat16()
    if by_element:
        q, k = (part.repeat_interleave(2, dim=1) for part in (q, k))
    sizes = (ROWS, heads, 128) if by_element else (ROWS, heads)
    decay, beta = -torch.rand(sizes, device="cuda") / 4, torch.rand(ROWS, heads, device="cuda")
    states = torch.randn(3, heads, 128, 128, device="cuda")
    made = gated_delta(q, k, v, decay, beta, states, Sequences.of(CU_LENS.cuda()))
    wide = (each.double() for each in (q, k, v, decay, beta, states))
    close(made, gated_delta_reference(*wide, CU_LENS.cuda()))


def test_mamba2() -> None:
    x = torch.randn(ROWS, 16, 64, device="cuda").bfloat16()
    b, c = torch.randn(2, ROWS, 2, 128, device="cuda").bfloat16()
    dt, a = torch.rand(ROWS, 16, device="cuda"), -torch.rand(16, device="cuda")
    d, states = torch.randn(16, device="cuda"), torch.randn(3, 16, 128, 64, device="cuda")
    made = mamba2(x, dt, a, b, c, d, states, Sequences.of(CU_LENS.cuda()))
    wide = (each.double() for each in (x, dt, a, b, c, d, states))
    close(made, mamba2_reference(*wide, CU_LENS.cuda()))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("requests", [1, 70])
def test_steps_of_gated_delta_nets(requests: int, count: int) -> None:
    """Two steps with the sizes of Qwen3-Next, the second of which writes a block; q, k and v are
    parts of rows that have the gate too.
    """
    heads, page, ring_rows = 32, 16, 22
    key_heads, width, channels = heads // 2, 512, heads // 2 * 512
    places = (Channels(at, width) for at in (0, 128, 256))
    form = HeadForm(
        torch.randn(4, channels, device="cuda") / 2, None, *places,
        *(heads, 2, 128, 128, 128**-0.5), is_unit=True,
    )  # fmt: skip
    gates = DeltaGates(*torch.randn(2, heads, device="cuda").sub(2.0).clamp(max=-0.1), 2)
    blocks = (
        torch.randn(2 * requests + 1, heads, 128, 128, device="cuda") / 8,
        torch.randn(2 * requests + 1, channels, 3, device="cuda").bfloat16(),
    )
    rings = (
        torch.randn(requests + 1, ring_rows, channels, device="cuda").bfloat16(),
        *torch.rand(2, requests + 1, ring_rows, heads, device="cuda").neg(),
    )
    found = (
        torch.zeros(requests + 1, ring_rows, key_heads, 128, device="cuda").bfloat16(),
        torch.zeros(requests + 1, ring_rows, heads, 128, device="cuda").bfloat16(),
    )
    memory = LayerMemory(blocks, rings, found)
    other = LayerMemory(*(tuple(part.clone() for part in parts) for parts in memory))
    slots = torch.arange(requests, device="cuda")
    borders = torch.full((requests + 1,), 4 * page, device="cuda")
    table = (slots + 1)[:, None] + torch.tensor([0, requests, 0], device="cuda")
    ends = borders + 10
    bounds = count * torch.arange(requests + 1, device="cuda", dtype=torch.int32)
    for start in (4 * page + 10, 5 * page - 1):
        positions = start + torch.arange(count * requests, device="cuda") % count
        rows = plan_slots(slots, bounds, positions, borders, ends, table, page)
        qkvz = torch.randn(len(positions), key_heads, width + 256, device="cuda").bfloat16()
        qkv, ba = (
            qkvz[..., :width],
            torch.randn(len(positions), 2 * heads, device="cuda").bfloat16(),
        )
        made = step_delta(form, gates, rows, memory, (qkv, ba))
        apart = qkv.flatten(1), *delta_gates(ba, *gates)
        close((made,), (step_heads(form, rows, other, apart).double(),))
        ends.fill_(5 * page - 1)
    for mine, wanted in zip(memory, other, strict=True):
        close(mine, tuple(part.double() for part in wanted))
