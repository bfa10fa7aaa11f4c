"""Recurrent layers in steps of few rows a request: the same as sequences taken through at once."""

from __future__ import annotations

import random

import pytest
import torch
from weft.kernels.ops.gated_delta import delta_gates
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.mamba2 import mamba2_reference
from weft.kernels.ops.short_conv import short_conv_reference
from weft.kernels.ops.slot_states import plan_slots
from weft.kernels.ops.slot_states import triton_delta as delta_steps
from weft.kernels.ops.slot_states import triton_states as gpu
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

PAGE, DRAFTS, SLOTS, LENGTH = 4, 2, 2, 11
RING_ROWS = PAGE + 2 * (1 + DRAFTS)
LONG_PAGE = 20
"""More rows than are taken at once."""
HEADS, SHARED, KEYS, VALUES = 2, 2, 6, 40
GROUPS = HEADS // SHARED
TILED_KEYS = 96
"""Whole tiles of keys, whose number is no power of two."""
MANY = 16
"""Requests from which on keys are taken in such tiles."""
MANY_DELTA = 64
"""Requests from which on the ring's keys are taken in halves by gated delta nets."""
DELTA_KINDS = ("delta", "delta apart", "delta wide")
"""Whose gates are computed on the way: of one head of keys, of two whose channels are sorted by
kind, and of two whose rows have something else between them.
"""


class Case:
    """One layer: its memory, and what it makes of whole sequences."""

    def __init__(self, kind: str, taps: int, page: int, keys: int = KEYS) -> None:
        self.kind, self.keys = kind, keys
        self.length = 2 * page + 3
        ring_rows = page + 2 * (1 + DRAFTS)
        self.groups = 2 if kind in DELTA_KINDS[1:] else GROUPS
        self.heads = heads = self.groups * SHARED
        step = 2 * keys + SHARED * VALUES
        self.widths = [keys, keys, SHARED * VALUES]
        self.channels = self.groups * step
        self.conv = torch.randn(taps, self.channels)
        places = [Channels(at, step) for at in (0, keys, 2 * keys)]
        self.in_tails = None
        if kind == "delta apart":
            firsts = (0, self.groups * keys, 2 * self.groups * keys)
            places = [Channels(*pair) for pair in zip(firsts, self.widths, strict=True)]
            numbers = torch.arange(self.channels).view(self.groups, step)
            kinds = numbers.split(self.widths, dim=1)
            self.in_tails = torch.cat([part.flatten() for part in kinds])
        sizes = heads, SHARED, keys, VALUES
        self.form = HeadForm(
            self.conv, None, *places, *sizes, keys**-0.5, True, in_tails=self.in_tails
        )
        of_gates = self.heads if kind == "delta apart" else SHARED
        self.delta = DeltaGates(-torch.rand(heads), torch.randn(heads), of_gates)
        gates: tuple[tuple[int, ...], ...] = ((heads,), (heads,))
        if kind == "by element":
            gates = ((HEADS, keys), (HEADS,))
        if kind == "mamba2":
            gates = ((HEADS,),)
            bias = torch.randn(self.channels)
            rates, skips = -torch.rand(HEADS), torch.randn(HEADS)
            forms = self.form._replace(bias=bias, scale=1.0, is_unit=False)
            self.form = forms._replace(rates=rates, skips=skips)
        tail = (self.channels, taps - 1)
        blocks = [
            torch.full((40, heads, keys, VALUES), torch.nan),
            torch.full((40, *tail), torch.nan),
        ]
        for pool in blocks:
            pool[0] = 0.0
        widths = ((self.channels,), *gates)
        rings = [torch.full((SLOTS + 1, ring_rows, *width), torch.nan) for width in widths]
        found = [
            torch.full((SLOTS + 1, ring_rows, *shape), torch.nan)
            for shape in ((self.groups, keys), (heads, VALUES))
        ]
        self.memory = LayerMemory(tuple(blocks), tuple(rings), tuple(found))
        self.gates = gates

    def inputs(self) -> tuple[torch.Tensor, ...]:
        rows = torch.randn(self.length, self.channels)
        if self.kind in DELTA_KINDS:
            return rows, torch.randn(self.length, 2 * self.heads)
        gates = [torch.rand(self.length, *shape) for shape in self.gates]
        if self.kind != "mamba2":
            gates[0] = -gates[0]
        return rows, *gates

    def step(self, plan: torch.Tensor, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self.kind not in DELTA_KINDS:
            return gpu.step_heads(self.form, plan, self.memory, inputs)
        rows, ba = inputs
        if self.kind == "delta wide":
            by_key_head = rows.unflatten(1, (self.groups, -1))
            rows = torch.cat([by_key_head, by_key_head[..., :5]], 2)[..., : by_key_head.shape[2]]
        return delta_steps.step_delta(self.form, self.delta, plan, self.memory, (rows, ba))

    def whole(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, gate, *beta = inputs
        if self.kind in DELTA_KINDS:
            gate, *beta = delta_gates(gate, *self.delta)
        bounds, form = torch.tensor([0, len(x)]), self.form
        tail = torch.zeros(1, self.channels, self.conv.shape[0] - 1)
        mixed = short_conv_reference(x, form.conv, form.bias, tail, bounds, has_silu=True)[0]
        if self.in_tails is not None:
            mixed = torch.empty_like(mixed).index_copy_(1, self.in_tails, mixed)
        parts = torch.unflatten(mixed, 1, (self.groups, -1)).split(self.widths, dim=2)
        values = parts[2].reshape(len(x), self.heads, VALUES)
        states = torch.zeros(1, self.heads, self.keys, VALUES)
        if form.rates is not None and form.skips is not None:
            b, c = parts[1], parts[0]
            return mamba2_reference(values, gate, form.rates, b, c, form.skips, states, bounds)[0]
        return gated_delta_reference(parts[0], parts[1], values, gate, beta[0], states, bounds)[0]


@pytest.mark.parametrize(
    ("kind", "taps", "page"),
    [
        ("delta wide", 4, PAGE),
        pytest.param("delta apart", 4, PAGE, marks=pytest.mark.full),
        pytest.param("one", 4, PAGE, marks=pytest.mark.full),
        pytest.param("delta", 3, LONG_PAGE, marks=pytest.mark.full),
        pytest.param("by element", 2, PAGE, marks=pytest.mark.full),
        pytest.param("mamba2", 3, PAGE, marks=pytest.mark.full),
        pytest.param("one", 4, LONG_PAGE, marks=pytest.mark.full),
        pytest.param("by element", 3, LONG_PAGE, marks=pytest.mark.full),
    ],
)
def test_drafts_that_are_not_accepted_leave_nothing(kind: str, taps: int, page: int) -> None:
    """Requests bring a row and drafts, of which some are wrong; blocks come from a table that is
    ahead of what the device knows.
    """
    fresh_seed()
    case = Case(kind, taps, page)
    texts = [case.inputs() for _ in range(SLOTS)]
    wholes = [case.whole(text) for text in texts]
    known = [0] * SLOTS
    borders, ends = torch.zeros(2, SLOTS + 1, dtype=torch.int64)
    shadows = torch.zeros(2, SLOTS + 1, dtype=torch.int64)
    table = torch.arange(3 * SLOTS).view(SLOTS, 3) + 1
    for _ in range(5 if page == PAGE else 30):
        slots = [
            slot for slot in range(SLOTS) if known[slot] < case.length and random.random() < 0.9
        ]
        random.shuffle(slots)
        counts = [
            min(1 + random.randrange(1 + DRAFTS), case.length - known[slot]) for slot in slots
        ]
        good = [random.randrange(1, count + 1) for count in counts]
        rows: list[list[torch.Tensor]] = [[] for _ in texts[0]]
        positions = list[int]()
        for slot, count, right in zip(slots, counts, good, strict=True):
            begin = known[slot]
            positions += range(begin, begin + count)
            for part, whole in zip(rows, texts[slot], strict=True):
                part.append(whole[begin : begin + right])
                part.append(torch.randn_like(whole[:1]).expand(count - right, *whole.shape[1:]))
        if not slots:
            continue
        idle = random.randrange(4)  # Rows of no request.
        inputs = tuple(
            torch.cat([*part, torch.full((idle, *part[0].shape[1:]), torch.nan)]) for part in rows
        )
        bounds = torch.tensor([0, *counts, 0]).cumsum(0).int()
        bounds[-1] = bounds[-2]  # A request of padding.
        of_slots = torch.tensor([*slots, SLOTS])
        blocks = torch.cat([table[torch.tensor(slots)], torch.zeros(1, 3, dtype=torch.int64)])
        given = of_slots, bounds, torch.tensor(positions)
        plan = gpu.plan(*given, borders, ends, blocks, page)
        expected = plan_slots(*given, *shadows, blocks, page).plan
        written = expected[:, 6] >= 0
        assert torch.equal(plan[:, :7], expected[:, :7])
        assert torch.equal(plan[written, 7], expected[written, 7])
        assert torch.equal(plan[:, 8], expected[:, 8])
        assert torch.equal(torch.stack([borders, ends]), shadows)
        made = case.step(plan, inputs)
        assert not made[len(positions) :].any()
        for number, (slot, right) in enumerate(zip(slots, good, strict=True)):
            first, begin = int(bounds[number]), known[slot]
            own = made[first : first + right]
            wanted = wholes[slot][begin : begin + right]
            torch.testing.assert_close(own, wanted, rtol=1e-3, atol=1e-3)
            known[slot] += right


@pytest.mark.parametrize(
    ("kind", "many"),
    [("delta", MANY_DELTA), pytest.param("one", MANY, marks=pytest.mark.full)],
)
def test_keys_in_whole_tiles(kind: str, many: int) -> None:
    """Keys of no other head are read, though the number of tiles is no power of two; the step in
    the middle writes a block, and the last one reads it.
    """
    fresh_seed()
    case = Case(kind, 2, PAGE, TILED_KEYS)
    inputs = case.inputs()
    whole = case.whole(inputs)
    slots, (borders, ends) = torch.tensor([0] + [SLOTS] * (many - 1)), torch.zeros(2, 3).long()
    blocks, at = torch.zeros(many, 3, dtype=torch.int64), 0
    blocks[0] = torch.tensor([1, 2, 3])
    for count in (2, 3, 2):
        bounds = torch.tensor([0] + [count] * many).int()
        rows = torch.arange(at, at + count)
        plan = gpu.plan(slots, bounds, rows, borders, ends, blocks, PAGE)
        made = case.step(plan, tuple(part[rows] for part in inputs))
        torch.testing.assert_close(made, whole[rows], rtol=1e-3, atol=1e-3)
        at += count
    written = case.memory.blocks[0].isfinite().flatten(1).all(dim=1)
    assert written.nonzero().flatten().tolist() == [0, 2]


def test_convolutions() -> None:
    """The whole state is the last rows."""
    fresh_seed()
    channels, taps = 30, 3
    weight, bias = torch.randn(taps, channels), torch.randn(channels)
    blocks = torch.full((7, channels, taps - 1), torch.nan)
    blocks[0] = 0.0
    memory = LayerMemory((blocks,), (torch.full((2, RING_ROWS, channels), torch.nan),))
    x, bounds = torch.randn(LENGTH, channels), torch.tensor([0, LENGTH])
    tail = torch.zeros(1, channels, taps - 1)
    whole = short_conv_reference(x, weight, bias, tail, bounds, has_silu=False)[0]
    (borders, ends), at = torch.zeros(2, 2, dtype=torch.int64), 0
    while at < LENGTH:
        count = min(random.randrange(1, 2 + DRAFTS), LENGTH - at)
        given = torch.tensor([0]), torch.tensor([0, count]).int(), torch.arange(at, at + count)
        plan = gpu.plan(*given, borders, ends, torch.tensor([[1, 2, 3]]), PAGE)
        made = gpu.step_conv(weight, bias, plan, memory, x[at : at + count])
        torch.testing.assert_close(made, whole[at : at + count], rtol=1e-4, atol=1e-4)
        at += random.randrange(1, count + 1)
