"""Attention whose rows do not depend on each other, by Triton's interpreter, against float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    eager_attention,
    exact_attention,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = [pytest.mark.needs("triton-interpreter"), pytest.mark.usefixtures("even_products")]

ROWS = 70
LENGTHS = [(ROWS, ROWS), (1, 0), (1, 70), (20, 200), (0, 5), (1, 1)]


def attend(module: ModuleType, case: Case) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan")).flatten(1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    attention = in_parts(partial(module.fixed_attention, out))
    attention(case.q, case.pool, LAYER, *lengths, case.max_q_len, case.max_kv_len)
    return out


def set_sizes(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, segment: int, *, is_split: bool
) -> None:
    """Small segments, each of a program of its own or not."""
    monkeypatch.setattr(module, "SEGMENT", segment)
    monkeypatch.setattr(module, "_PROGRAMS_PER_SM", 1 << 10 if is_split else 0)


@pytest.mark.parametrize(
    ("geometry", "dtype", "segment"),
    [
        (Geometry(3, 1, 24, 16), torch.float16, 64),
        (Geometry(6, 2, 24, 16), torch.float16, 1024),
        (Geometry(4, 1, 16, 32), torch.float32, 128),
    ],
)
def test_rows_are_the_same_bits_however_they_come(
    geometry: Geometry,
    dtype: torch.dtype,
    segment: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All rows of requests, in pieces of any length, beside others: of one row too."""
    fresh_seed()
    case = make_case(geometry, LENGTHS, dtype)
    with kernel_module("attention.triton_fixed", tmp_path) as module:
        set_sizes(module, monkeypatch, segment, is_split=False)
        whole = attend(module, case)
        assert_as_exact(whole, eager_attention(case), exact_attention(case))
        assert not whole[ROWS].any()
        set_sizes(module, monkeypatch, segment, is_split=True)
        assert torch.equal(attend(module, case), whole)
        begin = 0
        while begin < ROWS:
            end = min(ROWS, begin + random.choice((1, 7, 30, 48)))
            piece = case._replace(
                q=case.q[begin:end].contiguous(),
                page_table=case.page_table[:1],
                cu_q_lens=torch.tensor([0, end - begin], dtype=torch.int32),
                kv_lens=torch.tensor([end], dtype=torch.int32),
            )
            set_sizes(module, monkeypatch, segment, is_split=random.random() < 0.5)
            assert torch.equal(attend(module, piece), whole[begin:end])
            begin = end


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        ("// group) + requests", "// group)"),
        ("tl.minimum(common, segment_end), TILE", "tl.minimum(common, segment_end) - TILE, TILE"),
        ("tl.maximum(tail, segment * SEGMENT), segment_end", "tail, segment_end"),
        ("(segment + 1) * SEGMENT, end", "(segment + 1) * SEGMENT - TILE, end"),
    ],
)
@pytest.mark.full
def test_the_checks_see_a_mutation(
    change: tuple[str, str], is_split: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    case = make_case(Geometry(2, 1, 16, 16), [(30, 30), (40, 150)], torch.float16)
    with kernel_module("attention.triton_fixed", tmp_path, change) as module:
        set_sizes(module, monkeypatch, 128, is_split=is_split)
        out = attend(module, case)
    with pytest.raises(AssertionError):
        assert_as_exact(out, eager_attention(case), exact_attention(case))
