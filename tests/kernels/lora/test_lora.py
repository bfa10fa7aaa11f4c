"""Low-rank additions against float64 on fresh random inputs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.lora import add_embedding_lora, add_lora, sort_tokens
from weft.kernels.ops.lora.layout import ROW_RANK, pack_b
from weft.kernels.ops.lora.spec import EMPTY_SLOT, LoraAddition, LoraSegments, LoraWeights
from weft.kernels.shared import cpu
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)
from weft.testing.kernels.lora_cases import LoraCase, draw_slots, make_lora, segments_of

RANKS = [0, 8, 16, 5, 0, 40, 1]
"""By slot."""


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    return str(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    fresh_seed()
    seed = random.randrange(1 << 31)
    random.seed(seed)
    print(f"random {seed}")


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(*shape) / shape[-1] ** 0.5).to(dtype)


def addition(cases: list[LoraCase], slots: list[int], layer: int = 0) -> LoraAddition:
    return LoraAddition(tuple(c.packed().weights for c in cases), layer, segments_of(slots))


def add_all(
    cases: list[LoraCase], out: torch.Tensor, x: torch.Tensor, slots: list[int], layer: int = 0
) -> torch.Tensor:
    for case in cases:
        out = case.add(out, x, slots, layer)
    return out


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 72), (200, 201), (96, 577)])
def test_additions_to_a_linear_layer(n: int, k: int, dtype: torch.dtype) -> None:
    weight, bias = draw(n, k, dtype=dtype), draw(n, dtype=dtype)
    packed = pack_linear(weight, bias)
    case = make_lora(k, n, RANKS, dtype, layers=2)
    for rows in (0, 1, 2, 13, 40):
        slots = draw_slots(rows, len(RANKS))
        x, residual = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
        out = linear(x, packed, residual, lora=addition([case], slots, 1))
        peer = case.add(F.linear(x, weight, bias) + residual, x, slots, 1)
        parts = (x.double() @ weight.double().T, bias.double(), residual.double())
        exact = case.add(sum(parts), x.double(), slots, 1)
        # Parts may cancel: each is rounded as it is large.
        added = case.add(torch.zeros_like(parts[0]), x.double(), slots, 1)
        largest = sum(part.abs().max().item() if rows else 0.0 for part in (*parts, added))
        assert_as_exact(out, peer, exact, slack=torch.finfo(dtype).eps * largest)
        alone = [t for t, slot in enumerate(slots) if (1, slot) not in case.plain]
        assert torch.equal(out[alone], linear(x, packed, residual)[alone])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("missing", [None, 0, 1, 2])
def test_additions_to_parts_of_a_product(missing: int | None, dtype: torch.dtype) -> None:
    k, widths = 72, (90, 41, 41)
    weight = draw(sum(widths), k, dtype=dtype)
    cases = [
        make_lora(k, width, _turn(RANKS, part), dtype, column=sum(widths[:part]))
        for part, width in enumerate(widths)
        if part != missing
    ]
    slots = draw_slots(33, len(RANKS))
    x = torch.randn(33, k).to(dtype)
    out = linear(x, pack_linear(weight), lora=addition(cases, slots))
    exact = add_all(cases, x.double() @ weight.double().T, x.double(), slots)
    assert_as_exact(out, add_all(cases, F.linear(x, weight), x, slots), exact)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "k"), [(17, 72), (96, 40), (200, 201)])
@pytest.mark.parametrize("has_gate", [False, True])
def test_additions_before_an_activation(
    inner: int, k: int, has_gate: bool, dtype: torch.dtype
) -> None:
    weight = draw(2 * inner, k, dtype=dtype)
    cases = [make_lora(k, inner, _turn(RANKS, 2), dtype, column=inner)]
    if has_gate:
        cases.append(make_lora(k, inner, RANKS, dtype))
    slots = draw_slots(29, len(RANKS))
    x = torch.randn(29, k).to(dtype)
    packed = pack_gate_up(weight)
    out = gate_up_silu(x, packed, addition(cases, slots))
    gate, up = add_all(cases, x.double() @ weight.double().T, x.double(), slots).chunk(2, dim=-1)
    peer_gate, peer_up = add_all(cases, F.linear(x, weight), x, slots).chunk(2, dim=-1)
    assert_as_exact(out, F.silu(peer_gate) * peer_up, F.silu(gate) * up)
    alone = [t for t, slot in enumerate(slots) if slot == 0]
    assert torch.equal(out[alone], gate_up_silu(x, packed)[alone])


def _turn(ranks: list[int], by: int) -> list[int]:
    return ranks[:1] + ranks[1 + by :] + ranks[1 : 1 + by]


@pytest.mark.parametrize("dtype", DTYPES)
def test_additions_in_place(dtype: torch.dtype) -> None:
    cases = [make_lora(72, 40, RANKS, dtype), make_lora(72, 33, RANKS, dtype, column=47)]
    slots = draw_slots(21, len(RANKS))
    x, out = torch.randn(21, 72).to(dtype), torch.randn(21, 90).to(dtype)
    before = out.clone()
    add_lora(out, x, addition(cases, slots))
    exact = add_all(cases, before.double(), x.double(), slots)
    assert_as_exact(out, add_all(cases, before, x, slots), exact)
    assert torch.equal(out[:, 40:47], before[:, 40:47])
    assert torch.equal(out[:, 80:], before[:, 80:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_additions_to_an_embedding(dtype: torch.dtype) -> None:
    vocabulary = 31
    case = make_lora(vocabulary, 40, RANKS, dtype)
    slots = draw_slots(23, len(RANKS))
    ids, before = torch.randint(vocabulary, (23,)), torch.randn(23, 40).to(dtype)
    out = before.clone()
    add_embedding_lora(out, ids, addition([case], slots))
    one_hot = F.one_hot(ids, vocabulary)
    exact = case.add(before.double(), one_hot.double(), slots, 0)
    assert_as_exact(out, case.add(before, one_hot.to(dtype), slots, 0), exact)
    alone = [t for t, slot in enumerate(slots) if (0, slot) not in case.plain]
    assert torch.equal(out[alone], before[alone])


@pytest.mark.usefixtures("path")
def test_additions_to_logits_are_float32() -> None:
    weight, case = draw(90, 72, dtype=torch.bfloat16), make_lora(72, 90, RANKS, torch.bfloat16)
    slots = draw_slots(9, len(RANKS))
    x = torch.randn(9, 72).bfloat16()
    packed = pack_linear(weight)
    out = linear(x, packed, out_dtype=torch.float32, lora=addition([case], slots))
    assert out.dtype == torch.float32
    exact = case.add(x.double() @ weight.double().T, x.double(), slots, 0)
    assert_as_exact(out, case.add(F.linear(x, weight), x, slots, 0).float(), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    packed, case = pack_linear(draw(100, 136, dtype=dtype)), make_lora(136, 100, RANKS, dtype)
    # On AMX eight tokens of an adapter, and more, are added to in another way than fewer.
    slots = draw_slots(120, len(RANKS))
    x = torch.randn(120, 136).to(dtype)
    whole = linear(x, packed, lora=addition([case], slots))
    for begin, end in ((0, 1), (119, 120), (3, 20), (11, 38), (40, 100)):
        part = linear(x[begin:end], packed, lora=addition([case], slots[begin:end]))
        assert torch.equal(part, whole[begin:end])


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("if (rest > 0)", "if (rest < 0)"),
        ("first < num_tokens; first +=", "first < num_tokens - 1; first +="),
        (
            "i < count; i++) {\n    const char *words",
            "i < count - 1; i++) {\n    const char *words",
        ),
        ("done < count;) {", "done < count - 1;) {"),
        ("while (n > 0) {", "while (n >= VL) {"),
    ],
)
def test_a_mutated_operation_is_noticed(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    case = make_lora(73, 37, [0, 40, 16], torch.float32)
    slots = [1, 1, 1, 2, 0, 2, 1, 1, 2]
    x, weight = torch.randn(9, 73), draw(37, 73, dtype=torch.float32)
    mutated = mutated_native_cpu(tmp_path, "lora.h", original, replacement)
    monkeypatch.setattr(cpu, "native_cpu", lambda: mutated)
    out = linear(x, pack_linear(weight), lora=addition([case], slots))
    exact = case.add(x.double() @ weight.double().T, x.double(), slots, 0)
    with pytest.raises(AssertionError):
        assert_as_exact(out, case.add(F.linear(x, weight), x, slots, 0), exact)


@pytest.mark.parametrize("in_features", [64, 2101])
@pytest.mark.parametrize("columns", [32, 50])
def test_many_tokens_of_an_adapter_and_few(in_features: int, columns: int) -> None:
    """Additions far below what the product is rounded to, and some that are nearly zero."""
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    check_many_and_few(in_features, columns)


@pytest.mark.full
def test_ranks_rounded_once_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native = cpu.native_cpu()
    if native is None or not native.has_amx:
        pytest.skip("needs a CPU with AMX")
    rest = "nearest_to(_mm512_maskz_sub_ps(is_finite, x, nearest))"
    none = "_mm512_maskz_mov_ps(is_finite, _mm512_setzero_ps())"
    mutated = mutated_native_cpu(tmp_path, "lora_amx.h", rest, none)
    monkeypatch.setattr(cpu, "native_cpu", lambda: mutated)
    with pytest.raises(AssertionError):
        check_many_and_few(64, 50)


def check_many_and_few(in_features: int, columns: int) -> None:
    """Compares with float64, and parts of a batch with the whole."""
    case = make_lora(in_features, columns, [0, 40, 24, 16, 8], torch.bfloat16)
    packed = pack_linear(torch.zeros(columns, in_features, dtype=torch.bfloat16))
    slots = [1] * 40 + [2, 0] * 20 + [3] * 9 + [4, 3, 4]
    x = torch.randn(len(slots), in_features).bfloat16()
    x[::7] *= 1e-37
    whole = linear(x, packed, out_dtype=torch.float32, lora=addition([case], slots))
    exact = case.add(torch.zeros(len(slots), columns).double(), x.double(), slots, 0)
    scale = exact[1:7].abs().mean().item()
    torch.testing.assert_close(whole.double(), exact, rtol=1e-4, atol=1e-4 * scale)
    for size in (1, 7, 30):
        for begin in range(0, len(slots), size):
            rows = slice(begin, begin + size)
            added = addition([case], slots[rows])
            part = linear(x[rows], packed, out_dtype=torch.float32, lora=added)
            assert torch.equal(part, whole[rows])


@pytest.mark.full_after(1)
@pytest.mark.parametrize(
    ("original", "replacement"),
    [
        ("is_there = i < e->num_rows", "is_there = i + 1 < e->num_rows"),
        ("i < e->num_rows; i++) {", "i + 1 < e->num_rows; i++) {"),
        ("copy_end(end, from, ranks, bytes - 4 * whole);", "memset(end, 0, sizeof end);"),
        ("copy_end(end, from, 16, bytes - 4 * w);", "memset(end, 0, sizeof end);"),
        ("i < count; i += AMX_DEPTH / ROW_RANK", "i < count - 1; i += AMX_DEPTH / ROW_RANK"),
        ("packed->block != s->block", "packed->block < 0"),
        ("_mm512_maskz_compress_ps(slice->wanted, sum)", "sum"),
        ("i + 1 < s->count && s->rows[i + 1] == s->rows[i] + 1", "i + 1 < s->count"),
    ],
)
def test_a_mutated_operation_on_amx_is_noticed(
    original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = cpu.native_cpu()
    if native is None or not native.has_amx:
        pytest.skip("needs a CPU with AMX")
    # The second part begins within a panel and within a block of B. All is done by one thread.
    cases = [make_lora(41, 20, [0, 40, 8], torch.bfloat16, column=20 * part) for part in range(2)]
    slots = [1] * 9 + [2, 0, 2]
    x, weight = torch.randn(12, 41).bfloat16(), draw(40, 41, dtype=torch.bfloat16)

    def check() -> None:
        out = linear(x, pack_linear(weight), lora=addition(cases, slots))
        exact = add_all(cases, x.double() @ weight.double().T, x.double(), slots)
        assert_as_exact(out, add_all(cases, F.linear(x, weight), x, slots), exact)

    check()
    mutated = mutated_native_cpu(tmp_path, "lora_amx.h", original, replacement)
    monkeypatch.setattr(cpu, "native_cpu", lambda: mutated)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.usefixtures("path")
def test_additions_that_do_not_fit_are_refused() -> None:
    packed, case = pack_linear(torch.randn(40, 16)), make_lora(16, 40, RANKS, torch.float32)
    x = torch.randn(3, 16)
    with pytest.raises(ValueError, match="2 tokens, 3 rows"):
        linear(x, packed, lora=addition([case], [1, 1]))
    with pytest.raises(ValueError, match="layer 1"):
        linear(x, packed, lora=addition([case], [1, 1, 1], 1))
    for wrong in (
        make_lora(17, 40, RANKS, torch.float32),
        make_lora(16, 40, RANKS, torch.float32, column=1),
        make_lora(16, 40, RANKS, torch.bfloat16),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            linear(x, packed, lora=addition([wrong], [1, 1, 1]))


def test_rows_and_segments_that_do_not_exist_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    packed, x = pack_linear(torch.randn(40, 16)), torch.randn(3, 16)
    beyond = make_lora(16, 40, RANKS, torch.float32)
    beyond.weights.table[0, 2, 1] = len(beyond.weights.a)
    linear(x, packed, lora=addition([beyond], [1, 0, 1]))
    for case, slots in ((beyond, [1, 2, 0]), (beyond, [1, len(RANKS), 0])):
        with pytest.raises(IndexError, match="LoRA"):
            linear(x, packed, lora=addition([case], slots))
    right = segments_of([1, 0, 1])
    for name, values in (("order", [1, 0, 3]), ("starts", [0, 2, 3]), ("slots", [0, 2])):
        wrong = LoraSegments(
            **{n: getattr(right, n) for n in LoraSegments.__slots__}
            | {name: torch.tensor(values, dtype=torch.int32)}
        )
        case = make_lora(16, 40, RANKS, torch.float32)
        with pytest.raises(IndexError, match="LoRA"):
            linear(x, packed, lora=LoraAddition((case.packed().weights,), 0, wrong))


def test_the_worked_example_of_sorting() -> None:
    slots = np.array([0, 1, 0, 2, 3, 0, 1, 3], np.int32)
    segments = sort_tokens(slots)
    assert segments.order.tolist() == [0, 2, 5, 1, 6, 3, 4, 7]
    assert segments.starts.tolist() == [0, 3, 5, 6, 8]
    assert segments.slots.tolist() == [0, 1, 2, 3]
    padded = sort_tokens(slots, 6)
    assert padded.order.tolist() == segments.order.tolist()
    assert padded.starts.tolist() == [0, 3, 5, 6, 8, 8, 8]
    assert padded.slots.tolist() == [0, 1, 2, 3, EMPTY_SLOT, EMPTY_SLOT]
    with pytest.raises(ValueError, match="4 LoRA slots, there are 3"):
        sort_tokens(slots, 3)
    nothing = sort_tokens(slots[:0], 2)
    assert nothing.starts.tolist() == [0, 0, 0]


@pytest.mark.parametrize("rows", [[], [7], [6, 0, 3], [2, 2, 4, 1]])
@pytest.mark.parametrize("num_segments", [None, 6])
def test_selected_rows_are_sorted_like_a_step_of_their_own(
    rows: list[int], num_segments: int | None
) -> None:
    slots = np.array([0, 1, 0, 2, 3, 0, 1, 3], np.int32)
    selected = LoraSegments.of(sort_tokens(slots, num_segments)).select(
        torch.tensor(rows, dtype=torch.int64)
    )
    assert selected.token_slots.tolist() == slots[rows].tolist()
    seen = []
    for index, slot in enumerate(selected.slots.tolist()):
        tokens = selected.order[selected.starts[index] : selected.starts[index + 1]].tolist()
        assert tokens == [t for t, row in enumerate(rows) if slots[row] == slot]
        seen += tokens
    assert sorted(seen) == list(range(len(rows)))


def test_the_worked_example_of_packing() -> None:
    """Row 0 of B has 17 columns: rank 10 in column 3 is 1003."""
    rows = (100 * torch.arange(8.0)[:, None] + torch.arange(17))[None]
    floats, halves = pack_b(rows), pack_b(rows.half())
    assert floats.shape == halves.shape == (1, 2, 128)
    assert floats[0, 0, :18].tolist() == [*range(16), 100.0, 101.0]
    assert halves[0, 0, :4].tolist() == [0.0, 100.0, 1.0, 101.0]
    assert halves[0, 0, 32:36].tolist() == [200.0, 300.0, 201.0, 301.0]
    assert floats[0, 1, ::16].tolist() == [16.0 + 100 * rank for rank in range(8)]
    assert halves[0, 1, :3].tolist() == [16.0, 116.0, 0.0]
    assert floats[0, 1].count_nonzero() == halves[0, 1].count_nonzero() == 8


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("width", [1, 15, 16, 17, 32, 37, 96, 201])
def test_packed_rows_are_read_back(width: int, dtype: torch.dtype) -> None:
    b = torch.randn(5, ROW_RANK, width).to(dtype)
    table, counts = torch.zeros(1, 2, 1, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    weights = LoraWeights(torch.zeros(5, ROW_RANK, 3, dtype=dtype), b, table, counts)
    packed = weights.pack()
    assert packed.out_features == width
    rows = torch.tensor([4, 0, 4])
    assert torch.equal(packed.plain_b(rows), b[rows])
    assert torch.equal(weights.plain_b(rows), b[rows])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [[0, 8, 16, 24, 32], [0, 40, 48, 56, 64]])
@pytest.mark.parametrize("widths", [(48, 16), (33, 1, 47), (5, 64), (31, 70)])
def test_parts_that_begin_within_a_panel(
    widths: tuple[int, ...], ranks: list[int], dtype: torch.dtype
) -> None:
    """Few tokens of an adapter and more than a tile's, rows in order and not."""
    k = 1096 if widths == (5, 64) else 104
    slots = [1] * 40 + [2, 3] * 9 + [4, 0] * 3
    random.shuffle(slots)
    weight, x = draw(sum(widths), k, dtype=dtype), torch.randn(len(slots), k).to(dtype)
    cases = [
        make_lora(k, width, ranks, dtype, column=sum(widths[:part]), in_order=part != 1)
        for part, width in enumerate(widths)
    ]
    out = linear(x, pack_linear(weight), lora=addition(cases, slots))
    exact = add_all(cases, x.double() @ weight.double().T, x.double(), slots)
    assert_as_exact(out, add_all(cases, F.linear(x, weight), x, slots), exact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_place_of_rows_changes_nothing(dtype: torch.dtype) -> None:
    """On AMX two rows of A that follow each other are multiplied at once."""
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    case = make_lora(136, 80, RANKS, dtype, in_order=True)
    w, last = case.weights, len(case.weights.a) - 1
    turned = replace(w, a=w.a.flip(0), b=w.b.flip(0), table=last - w.table)
    slots = draw_slots(70, len(RANKS))
    x, packed = torch.randn(70, 136).to(dtype), pack_linear(draw(80, 136, dtype=dtype))
    out = linear(x, packed, lora=addition([case], slots))
    other = linear(x, packed, lora=addition([LoraCase(turned, case.plain)], slots))
    assert torch.equal(out, other)


def test_tensors_that_do_not_fit_together_are_refused() -> None:
    a, b = torch.zeros(4, ROW_RANK, 16), torch.zeros(4, ROW_RANK, 32)
    table, counts = torch.zeros(2, 3, 1, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
    weights = LoraWeights(a, b, table, counts)
    assert (weights.in_features, weights.out_features, weights.max_rank) == (16, 32, ROW_RANK)
    for wrong in (
        (a[:3], b, table, counts),
        (a[:, :4], b[:, :4], table, counts),
        (a, b.bfloat16(), table, counts),
        (a, b, table, counts[:1]),
        (a, b, table.long(), counts),
        (a, b.mT.contiguous().mT, table, counts),
    ):
        with pytest.raises(ValueError, match="LoRA"):
            LoraWeights(*wrong)
    with pytest.raises(ValueError, match="LoRA"):
        replace(weights.pack(), packed_width=33)
    with pytest.raises(ValueError, match="LoRA"):
        replace(weights, packed_width=32)


def test_rows_that_are_not_packed_are_refused() -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    case = make_lora(16, 40, RANKS, torch.float32)
    added = LoraAddition((case.weights,), 0, segments_of([1, 0, 1]))
    with pytest.raises(ValueError, match="not packed"):
        linear(torch.randn(3, 16), pack_linear(torch.randn(40, 16)), lora=added)
