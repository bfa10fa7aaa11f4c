"""Rows that see later rows of their request, in paged attention, against float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.shared import cpu
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    eager_attention,
    exact_attention,
    in_parts,
    make_case,
    random_key_ends,
)
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import DTYPES, assert_as_exact, fresh_seed

LENGTHS = [(1, 1), (37, 37), (140, 1107), (0, 12), (1, 700), (3, 600), (90, 90)]


def attend(case: Case, ends: torch.Tensor | None, window: int | None) -> torch.Tensor:
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    most = (case.max_q_len, case.max_kv_len)
    options = {"window": window, "key_ends": ends}
    return in_parts(paged_attention)(case.q, case.pool, LAYER, *lengths, *most, **options)


@pytest.mark.parametrize("path", ["native", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 24, 100])
def test_rows_see_up_to_their_ends(
    window: int | None, dtype: torch.dtype, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window begins as a row's own position says, whatever the row sees behind itself."""
    if path == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    fresh_seed()
    lengths = random.sample(LENGTHS, len(LENGTHS))
    for geometry in (Geometry(9, 3, 64, 16), Geometry(8, 1, 72, 8)):
        case = make_case(geometry, lengths, dtype)
        ends = random_key_ends(case)
        eager = eager_attention(case, window=window, key_ends=ends)
        exact = exact_attention(case, window=window, key_ends=ends)
        assert_as_exact(attend(case, ends, window), eager, exact)


def test_ends_of_their_own_change_nothing() -> None:
    fresh_seed()
    case = make_case(Geometry(6, 2, 64, 16), [(5, 200), (1, 300), (90, 90)], torch.float32)
    own = torch.cat([torch.arange(196, 201), torch.tensor([300]), torch.arange(1, 91)]).int()
    assert torch.equal(attend(case, own, None), attend(case, None, None))


def test_ends_outside_are_refused() -> None:
    fresh_seed()
    case = make_case(Geometry(2, 1, 64, 16), [(4, 40)], torch.float32)
    for ends in ([38, 38, 39, 41], [36, 38, 39, 40]):
        with pytest.raises(IndexError):
            attend(case, torch.tensor(ends, dtype=torch.int32), None)
    for wrong in (torch.zeros(4), torch.zeros(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="key_ends"):
            attend(case, wrong, None)


def extend(module: ModuleType, case: Case, window: int | None, ends: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan")).flatten(1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, case.max_q_len, 800)
    attention = in_parts(partial(module.extend_attention, out))
    attention(case.q, case.pool, LAYER, *lengths, own=None, window=window, key_ends=ends)
    return out


def fixed(module: ModuleType, case: Case, window: int | None, ends: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan")).flatten(1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, case.max_q_len, 800)
    attention = in_parts(partial(module.fixed_attention, out))
    attention(case.q, case.pool, LAYER, *lengths, window=window, key_ends=ends)
    return out


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    ("kernel", "dtype", "window"),
    [
        ("extend", torch.float32, None),
        ("extend", torch.float16, 40),
        ("fixed", torch.float32, 40),
        ("fixed", torch.float16, None),
    ],
)
def test_kernels_of_a_gpu(
    kernel: str, dtype: torch.dtype, window: int | None, tmp_path: Path
) -> None:
    fresh_seed()
    case = make_case(Geometry(4, 2, 24, 16), [(37, 37), (90, 200), (2, 30), (75, 75)], dtype)
    ends = random_key_ends(case)
    eager = eager_attention(case, window=window, key_ends=ends)
    exact = exact_attention(case, window=window, key_ends=ends)
    with kernel_module(f"attention.triton_{kernel}", tmp_path) as module:
        made = {"extend": extend, "fixed": fixed}[kernel](module, case, window, ends)
    assert_as_exact(made, eager, exact)
