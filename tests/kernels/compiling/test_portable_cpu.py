"""The native operations as built for CPUs without AMX, AVX512 and AVX, against torch."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from weft.engine.model.stack import run_all
from weft.kernels.ops.activation import silu_and_mul, silu_and_mul_reference
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.gated_delta import gated_delta
from weft.kernels.ops.gated_delta.reference import gated_delta_reference
from weft.kernels.ops.linear import gate_up_silu, linear
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.lora.spec import LoraAddition
from weft.kernels.ops.mamba2 import mamba2, mamba2_reference
from weft.kernels.ops.norm import rms_norm
from weft.kernels.ops.norm.reference import rms_norm_reference
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.rope import rope_and_cache
from weft.kernels.ops.rope.reference import rope_and_cache_reference
from weft.kernels.ops.selective_scan import selective_scan, selective_scan_reference
from weft.kernels.ops.short_conv import short_conv, short_conv_reference
from weft.kernels.shared import cpu
from weft.kernels.shared.build import load_native, loaded_openmp_library
from weft.kernels.shared.formats.int_groups import pack_int_groups
from weft.kernels.shared.formats.quantised import quantise_channels
from weft.kernels.shared.packaged import VARIANTS, instructions
from weft.testing.kernels.attention_cases import in_parts
from weft.testing.kernels.group_cases import rows_as_multiplied
from weft.testing.kernels.kernel_checks import DTYPES, fresh_seed
from weft.testing.kernels.layer_cases import (
    DIM,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    PAGE_SIZE,
    make_run,
    make_step,
    run_by_operation,
)
from weft.testing.kernels.lora_cases import draw_slots, make_lora, segments_of

if platform.machine() != "x86_64":
    pytest.skip("needs an x86-64 CPU", allow_module_level=True)
if cpu.native_cpu() is None:
    pytest.skip(f"cc: {cpu.native_cpu_missing()}", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


TUNED = ("-march=x86-64-v3", "-mtune=znver2", "-O3")
"""For these CPUs gcc takes fused multiply-adds apart where they wait for each other: in copies of
a loop for few rows, and not in those for many."""


BUILDS = {
    "no-amx": ("-O0", "-march=native", cpu.NO_AMX),
    "x86-64-v3": ("-O0", "-march=x86-64-v3"),
    "x86-64, no OpenMP": ("-O0", "-march=x86-64"),
    "tuned": TUNED,
}
OF_WHEELS = {
    f"wheel's {variant.name}": variant.flags
    for variant in VARIANTS["x86_64"]
    if variant.needs <= instructions()
}
"""Those of a wheel that this CPU runs."""


def builds() -> Iterator[Any]:
    """Their names; a compiler takes some ten seconds for what is "tuned" or of wheels."""
    for name in (*BUILDS, *OF_WHEELS):
        is_long = name == "tuned" or name in OF_WHEELS
        yield pytest.param(name, marks=[pytest.mark.full] if is_long else ())


@pytest.fixture(params=builds(), scope="module")
def older(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> cpu.NativeCpu:
    native = cpu.native_cpu()
    assert native is not None
    if request.param == "no-amx" and not native.has_amx:
        pytest.skip("this CPU has no AMX: all other tests run without")
    built = load_native(
        cpu.SOURCE,
        openmp_library=None if "no OpenMP" in request.param else loaded_openmp_library(),
        flags=(BUILDS | OF_WHEELS)[request.param],
        folder=tmp_path_factory.mktemp("built"),
    )
    assert built.library is not None, built.reason
    native = cpu.NativeCpu(built.library)
    assert not (native.has_amx and request.param == "no-amx")
    return native


@pytest.fixture(autouse=True)
def use_it(older: cpu.NativeCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "native_cpu", lambda: older)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: older)
    fresh_seed()


def assert_near(out: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[out.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype: torch.dtype) -> None:
    for n, k in ((33, 201), (64, 576)):
        weight, bias = (torch.randn(n, k) / k**0.5).to(dtype), torch.randn(n).to(dtype)
        packed = pack_linear(weight, bias)
        for rows in (1, 3, 4, 9, 30):
            x, residual = torch.randn(rows, k).to(dtype), torch.randn(rows, n).to(dtype)
            assert_near(linear(x, packed, residual), F.linear(x, weight, bias) + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_does_not_depend_on_the_others(dtype: torch.dtype) -> None:
    case = make_lora(136, 100, [0, 8, 5, 40], dtype)
    packed = pack_linear((torch.randn(100, 136) / 136**0.5).to(dtype))
    slots, x = draw_slots(60, 4), torch.randn(60, 136).to(dtype)

    def added(begin: int, end: int) -> LoraAddition:
        return LoraAddition((case.packed().weights,), 0, segments_of(slots[begin:end]))

    plain, whole = linear(x, packed), linear(x, packed, lora=added(0, 60))
    for begin, end in ((0, 1), (59, 60), (3, 20), (11, 38)):
        assert torch.equal(linear(x[begin:end], packed), plain[begin:end])
        part = linear(x[begin:end], packed, lora=added(begin, end))
        assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_up_silu(dtype: torch.dtype) -> None:
    weight = (torch.randn(2 * 43, 72) / 72**0.5).to(dtype)
    x = torch.randn(7, 72).to(dtype)
    expected = silu_and_mul_reference(F.linear(x, weight))
    assert_near(gate_up_silu(x, pack_gate_up(weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_weights(dtype: torch.dtype) -> None:
    for n, k in ((33, 201), (64, 576)):
        matrix, bias = quantise_channels(torch.randn(n, k) / k**0.5), torch.randn(n).to(dtype)
        packed, wide = pack_linear(matrix, bias, dtype=dtype), matrix.dequantised(torch.float32)
        x, residual = torch.randn(30, k).to(dtype), torch.randn(30, n).to(dtype)
        whole = linear(x, packed, residual)
        expected = F.linear(x.float(), wide, bias.float()) + residual.float()
        assert_near(whole, expected.to(dtype))
        for rows in (1, 2, 3, 4, 9):
            assert torch.equal(linear(x[:rows], packed, residual[:rows]), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "has_offsets"), [(4, True), (4, False), (8, True)])
def test_weights_in_groups(bits: Literal[4, 8], has_offsets: bool, dtype: torch.dtype) -> None:
    numbers = torch.randint(0, 16, (33, 201)) - 8 * (not has_offsets)
    scales, offsets = torch.rand(33, 7).half() / 40, torch.randn(33, 7).half() / 40
    matrix = pack_int_groups(numbers, scales, offsets if has_offsets else None, 32, bits)
    packed, wide = pack_linear(matrix, dtype=dtype), matrix.dequantised(torch.float32)
    x = torch.randn(30, 201).to(dtype)
    whole = linear(x, packed)
    assert_near(whole, F.linear(rows_as_multiplied(x, matrix).float(), wide).to(dtype))
    for rows in (1, 2, 3, 4, 9):
        assert torch.equal(linear(x[:rows], packed), whole[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 144).to(dtype), torch.randn(144).to(dtype)
    assert_near(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    assert_near(silu_and_mul(x), silu_and_mul_reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "page_size"), [(64, 16), (80, 8)])
def test_rope_and_attention(dim: int, page_size: int, dtype: torch.dtype) -> None:
    heads, kv_heads, kv_lens, q_lens = 6, 2, [700, 40, 3], [1, 35, 3]
    pages = torch.randperm(3 * 90).int().view(3, 90)
    pool = torch.randn(270, kv_heads, 2, 2, page_size, dim).to(dtype)
    other_pool = pool.clone()
    positions = torch.cat([torch.arange(kv - q, kv) for q, kv in zip(q_lens, kv_lens, strict=True)])
    requests = torch.arange(3).repeat_interleave(torch.tensor(q_lens))
    slots = pages[requests, positions // page_size].long() * page_size + positions % page_size
    angles = torch.rand(700, dim // 2) * 6
    qkv = torch.randn(sum(q_lens), (heads + 2 * kv_heads) * dim).to(dtype)
    rope = (positions, torch.cat((angles.cos(), angles.sin()), dim=1))
    q = rope_and_cache(qkv, *rope, pool, 1, slots, heads, kv_heads)
    other = rope_and_cache_reference(qkv, *rope, other_pool, 1, slots, heads, kv_heads)
    assert_near(q, other)
    assert_near(pool, other_pool)
    starts = torch.tensor([0, *q_lens]).cumsum(0).int()
    lengths = torch.tensor(kv_lens).int()
    call = (other_pool, 1, pages, starts, lengths, dim**-0.5, max(q_lens), max(kv_lens))
    for window in (None, 21):
        out = in_parts(paged_attention)(other, *call, window=window)
        assert_near(out, in_parts(paged_attention_reference)(other, *call, window=window))


@pytest.mark.parametrize("dtype", DTYPES)
def test_additions_of_adapters(dtype: torch.dtype) -> None:
    cases = [
        make_lora(72, width, [0, 8, 3, 24], dtype, column=column)
        for width, column in ((50, 0), (33, 57))
    ]
    slots = draw_slots(130, 4)
    weight = (torch.randn(90, 72) / 72**0.5).to(dtype)
    x = torch.randn(130, 72).to(dtype)
    added = LoraAddition(tuple(case.packed().weights for case in cases), 0, segments_of(slots))
    expected = F.linear(x, weight)
    for case in cases:
        expected = case.add(expected, x, slots, 0)
    torch.testing.assert_close(
        linear(x, pack_linear(weight), lora=added),
        expected,
        rtol=TOLERANCE[dtype],
        atol=3 * TOLERANCE[dtype],
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_equal_their_single_operations(dtype: torch.dtype) -> None:
    run = make_run(dtype, qwen=True)
    lengths = [(1, 60), (30, 70), (3, 3)]
    pool = torch.randn(12 * len(lengths), KV_HEADS, LAYERS, 2, PAGE_SIZE, DIM).to(dtype)
    other_pool = pool.clone()
    hidden = torch.randn(34, HIDDEN).to(dtype)
    step = make_step(lengths, pool)
    other = run_by_operation(run, hidden, step, other_pool)
    out = run_all([run], hidden, step, pool)
    assert torch.equal(out, other)
    assert torch.equal(pool, other_pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_element", [False, True])
def test_recurrences(dtype: torch.dtype, by_element: bool) -> None:
    rows, heads, keys, values = 21, 4, 20, 75
    cu_lens = torch.tensor([0, 1, rows])
    q, k = torch.randn(2, rows, heads // 2, keys).to(dtype)
    v = torch.randn(rows, heads, values).to(dtype)
    size = (rows, heads, keys) if by_element else (rows, heads)
    states = torch.randn(2, heads, keys, values)
    sequences = Sequences.of(cu_lens)
    delta = (q, k, v, -torch.rand(size), torch.rand(rows, heads), states)
    gates = torch.rand(rows, heads), -torch.rand(heads)
    mamba = (v, *gates, k, q, torch.randn(heads), states)
    for made, expected in (
        (gated_delta(*delta, sequences), gated_delta_reference(*delta, cu_lens)),
        (mamba2(*mamba, sequences), mamba2_reference(*mamba, cu_lens)),
    ):
        torch.testing.assert_close(made[0], expected[0], rtol=1e-2, atol=10 * TOLERANCE[dtype])
        torch.testing.assert_close(made[1], expected[1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_selective_scans(dtype: torch.dtype) -> None:
    rows, channels, size = 21, 75, 6
    x, (b, c) = torch.randn(rows, channels).to(dtype), torch.randn(2, rows, size).to(dtype)
    a, states = -torch.rand(size, channels), torch.randn(2, size, channels)
    bounds, dt, d = torch.tensor([0, 1, rows]), torch.rand(rows, channels), torch.randn(channels)
    made, after = selective_scan(x, dt, a, b, c, d, states, Sequences.of(bounds))
    expected, behind = selective_scan_reference(x, dt, a, b, c, d, states, bounds)
    torch.testing.assert_close(made, expected, rtol=1e-2, atol=10 * TOLERANCE[dtype])
    torch.testing.assert_close(after, behind, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolutions(dtype: torch.dtype) -> None:
    rows, channels, taps = 21, 75, 4
    x, tails = torch.randn(rows, channels).to(dtype), torch.randn(2, channels, taps - 1).to(dtype)
    given = (x, torch.randn(taps, channels), torch.randn(channels), tails)
    bounds = torch.tensor([0, 1, rows])
    made, left = short_conv(*given, Sequences.of(bounds), has_silu=True)
    expected, behind = short_conv_reference(*given, bounds, has_silu=True)
    torch.testing.assert_close(made, expected, rtol=1e-2, atol=TOLERANCE[dtype])
    assert torch.equal(left, behind)
