"""Recurrent operations against loops over rows in float64, and against transformers' functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.gated_delta import gated_delta
from weft.kernels.ops.gated_delta.reference import unit_length
from weft.kernels.ops.gated_norm import gated_norm
from weft.kernels.ops.mamba2 import mamba2
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.selective_scan import selective_scan
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import DTYPES

WIDE = torch.float64
Operation = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Case(NamedTuple):
    """Rows of ragged sequences, what is the same for all rows, and states before them."""

    rows: tuple[torch.Tensor, ...]
    shared: tuple[torch.Tensor, ...]
    states: torch.Tensor
    cu_lens: torch.Tensor

    def run(self, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
        return operation(*self.rows, *self.shared, self.states, Sequences.of(self.cu_lens))

    def to(self, dtype: torch.dtype) -> Case:
        """With rows of a dtype; what there is one of for each row, and states, in float32."""
        wide = [each.to(dtype if each.dim() > 2 else torch.float32) for each in self.rows]
        shared = [each.float() for each in self.shared]
        return Case(tuple(wide), tuple(shared), self.states.float(), self.cu_lens)

    def double(self) -> Case:
        """The same numbers in float64."""
        parts = (tuple(each.double() for each in part) for part in (self.rows, self.shared))
        return Case(*parts, self.states.double(), self.cu_lens)

    def by_row(self, row: Operation) -> tuple[torch.Tensor, torch.Tensor]:
        """A loop over rows by a function of one row of one sequence."""
        after = self.states.clone()
        made = []
        bounds = self.cu_lens.tolist()
        for number, (begin, end) in enumerate(pairwise(bounds)):
            for at in range(begin, end):
                parts = [each[at] for each in self.rows]
                out, after[number] = row(*parts, *self.shared, after[number])
                made.append(out)
        return torch.stack(made), after

    def in_two(self, operation: Operation) -> tuple[torch.Tensor, torch.Tensor]:
        """Every sequence in two calls where it has several rows."""
        lengths = self.cu_lens.diff().tolist()
        cuts = [random.randint(1, length) for length in lengths]
        starts, states = self.cu_lens.tolist(), self.states.clone()
        made = torch.empty(0)
        for begins, ends in (([0] * len(cuts), cuts), (cuts, lengths)):
            live = [n for n in range(len(cuts)) if ends[n] > begins[n]]
            if not live:
                continue
            rows = torch.cat(
                [torch.arange(starts[n] + begins[n], starts[n] + ends[n]) for n in live]
            )
            sizes = torch.tensor([0, *[ends[n] - begins[n] for n in live]]).cumsum(0)
            parts = [each[rows] for each in self.rows]
            out, states[live] = operation(*parts, *self.shared, states[live], Sequences.of(sizes))
            if not made.numel():
                made = out.new_empty(starts[-1], *out.shape[1:])
            made[rows] = out
        return made, states


def lengths() -> torch.Tensor:
    """Sequences of one row, of a few, and of more than a piece."""
    counts = [1, random.randint(2, 20), random.randint(65, 80)]
    random.shuffle(counts)
    return torch.tensor([0, *counts]).cumsum(0)


def delta_case(*, by_element: bool = False, most_beta: float = 1.0) -> Case:
    cu_lens = lengths()
    count, heads, shared, dim, value = int(cu_lens[-1]), 2, 3, 6, random.choice((5, 70))
    q, k = torch.randn(2, count, heads, dim, dtype=WIDE)
    v = torch.randn(count, heads * shared, value, dtype=WIDE)
    if by_element:
        q, k = (each.repeat_interleave(shared, dim=1) for each in (q, k))
    size = (count, heads * shared, dim) if by_element else (count, heads * shared)
    # From states that last to some that are forgotten within a few rows.
    decay = -torch.rand(size, dtype=WIDE) * 10.0 ** torch.randint(-3, 2, (1, *size[1:]))
    beta = most_beta * torch.rand(count, heads * shared, dtype=WIDE)
    states = torch.randn(len(cu_lens) - 1, heads * shared, dim, value, dtype=WIDE)
    return Case((q, k, v, decay, beta), (), states, cu_lens)


def delta_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads = len(v)
    q, k = (unit_length(each).repeat_interleave(heads // len(each), dim=0) for each in (q, k))
    state = state * decay.exp().view(heads, -1, 1)
    update = beta[:, None] * (v - torch.einsum("hd,hde->he", k, state))
    state = state + k[:, :, None] * update[:, None]
    return torch.einsum("hd,hde->he", q, state) * q.shape[1] ** -0.5, state


def mamba_case() -> Case:
    cu_lens = lengths()
    count, groups, shared, width, size = int(cu_lens[-1]), 2, 3, 35, 6
    heads = groups * shared
    x = torch.randn(count, heads, width, dtype=WIDE)
    dt = F.softplus(torch.randn(count, heads, dtype=WIDE))
    b, c = torch.randn(2, count, groups, size, dtype=WIDE)
    a = -torch.exp(2.0 * torch.randn(heads, dtype=WIDE))
    states = torch.randn(len(cu_lens) - 1, heads, size, width, dtype=WIDE)
    return Case((x, dt, b, c), (a, torch.randn(heads, dtype=WIDE)), states, cu_lens)


def mamba(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    return mamba2(x, dt, a, b, c, d, states, sequences)


def mamba_row(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    b, c = (each.repeat_interleave(len(x) // len(each), dim=0) for each in (b, c))
    state = state * torch.exp(dt * a)[:, None, None]
    state = state + b[:, :, None] * (dt[:, None] * x)[:, None]
    return torch.einsum("hn,hnp->hp", c, state) + d[:, None] * x, state


def select_case() -> Case:
    cu_lens = lengths()
    count, channels, size = int(cu_lens[-1]), 37, 6
    x = torch.randn(count, channels, 1, dtype=WIDE)
    dt = F.softplus(torch.randn(count, channels, dtype=WIDE))
    b, c = torch.randn(2, count, size, 1, dtype=WIDE)
    a = -torch.exp(2.0 * torch.randn(size, channels, dtype=WIDE))
    states = torch.randn(len(cu_lens) - 1, size, channels, dtype=WIDE)
    return Case((x, dt, b, c), (a, torch.randn(channels, dtype=WIDE)), states, cu_lens)


def select(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    states: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    return selective_scan(x[..., 0], dt, a, b[..., 0], c[..., 0], d, states, sequences)


def select_row(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    d: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    state = state * torch.exp(dt * a) + b * (dt * x[:, 0])
    return (c * state).sum(0) + d * x[:, 0], state


def conv_case(taps: int) -> Case:
    cu_lens = lengths()
    count, channels = int(cu_lens[-1]), 23
    weight = torch.randn(taps, channels, dtype=WIDE)
    # Tails have the rows' dtype, so that they must be numbers of bfloat16 too.
    tails = torch.randn(len(cu_lens) - 1, channels, taps - 1).bfloat16().to(WIDE)
    rows = torch.randn(count, channels, 1, dtype=WIDE)
    return Case((rows,), (weight, torch.randn(channels, dtype=WIDE)), tails, cu_lens)


def conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    tails: torch.Tensor,
    sequences: Sequences,
) -> tuple[torch.Tensor, torch.Tensor]:
    out, left = short_conv(x[..., 0], weight, bias, tails.to(x.dtype), sequences, has_silu=True)
    return out, left.to(tails.dtype)


def conv_row(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, tail: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    seen = torch.cat((tail, x), dim=1)
    return F.silu((seen * weight.t()).sum(1) + bias), seen[:, 1:]


CASES: dict[str, tuple[Callable[[], Case], Operation, Operation]] = {
    "gated-delta": (delta_case, gated_delta, delta_row),
    "gated-delta-by-element": (lambda: delta_case(by_element=True), gated_delta, delta_row),
    "gated-delta-beyond-one": (lambda: delta_case(most_beta=2.0), gated_delta, delta_row),
    "mamba2": (mamba_case, mamba, mamba_row),
    "selective-scan": (select_case, select, select_row),
    "short-conv": (lambda: conv_case(4), conv, conv_row),
    "shortest-conv": (lambda: conv_case(2), conv, conv_row),
}


@pytest.mark.parametrize("name", CASES)
def test_pieces_compute_what_rows_do_one_after_another(name: str) -> None:
    make, operation, row = CASES[name]
    case = make()
    before = case.states.clone()
    expected = case.by_row(row)
    for made in (case.run(operation), case.in_two(operation)):
        for ours, theirs in zip(made, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert torch.equal(case.states, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_native_forms_and_where_they_are_cut(name: str, dtype: torch.dtype) -> None:
    """Near a loop in float64; a row's bits are the same however its sequence is cut."""
    if cpu.native_cpu() is None:
        pytest.fail(f"no native operations: {cpu.native_cpu_missing()}")
    make, operation, row = CASES[name]
    case = make().to(dtype)
    made, states = case.run(operation)
    expected, after = case.double().by_row(row)
    assert made.dtype == dtype
    bound = 1e-4 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(made.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(states.double(), after, rtol=1e-4, atol=1e-4)
    again, left = case.in_two(operation)
    assert torch.equal(again, made)
    assert torch.equal(left, states)


def test_gated_delta_of_one_sequence_is_transformers() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as reference

    case = delta_case()
    rows = [each.float() for each in case.rows]
    count, state = len(rows[0]), case.states[:1].float()
    expected, after = reference.torch_chunk_gated_delta_rule(
        *(each[None] for each in rows),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    made, states = gated_delta(*rows, state, Sequences.of(torch.tensor([0, count])))
    torch.testing.assert_close(made, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, after, rtol=1e-4, atol=1e-4)


def test_mamba2_of_one_sequence_is_transformers() -> None:
    from transformers.models.bamba import modeling_bamba as reference

    case = mamba_case()
    (x, dt, b, c), (a, d) = ([each.float() for each in part] for part in case[:2])
    expected, after = reference.mamba2_chunk_scan(
        x[None],
        dt[None],
        a,
        b[None],
        c[None],
        chunk_size=16,
        D=d,
        initial_states=case.states[:1].float().transpose(2, 3),
        return_final_states=True,
    )
    whole = Sequences.of(torch.tensor([0, len(x)]))
    made, states = mamba2(x, dt, a, b, c, d, case.states[:1].float(), whole)
    torch.testing.assert_close(made, expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, after.transpose(2, 3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gates_first", [False, True])
def test_gated_norms(gates_first: bool) -> None:
    x, gate, weight = torch.randn(4, 3, 8), torch.randn(4, 3, 8), torch.randn(3, 8)
    exact, factor = x.double(), F.silu(gate.double())
    exact = exact * factor if gates_first else exact
    exact = F.rms_norm(exact, (8,), eps=1e-5) * weight.double()
    exact = exact if gates_first else exact * factor
    made = gated_norm(x, gate, weight, 1e-5, gates_first=gates_first)
    torch.testing.assert_close(made.double(), exact, rtol=1e-5, atol=1e-5)
    plain = gated_norm(x, gate, None, 1e-5, form="sigmoid", gates_first=gates_first)
    torch.testing.assert_close(plain, x * gate.sigmoid())
    in_pairs = gated_norm(*(torch.cat([each, -each], 1) for each in (x, gate)), None, 1e-5)
    split = gated_norm(torch.cat([x, -x], 1), torch.stack([gate, -gate], 1), None, 1e-5)
    assert torch.equal(in_pairs, split)


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = delta_case()
    short = tuple(each[:-1] for each in case.rows)
    with pytest.raises(ValueError, match="do not fit"):
        gated_delta(*short, case.states, Sequences.of(case.cu_lens))
    with pytest.raises(ValueError, match="do not fit"):
        conv_case(4).run(lambda *parts: conv(parts[0][:-1], *parts[1:]))
    broken = mamba_case()
    with pytest.raises(ValueError, match="do not fit"):
        broken._replace(states=broken.states[:, :-1]).run(mamba)
