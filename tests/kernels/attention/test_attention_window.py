"""Sliding windows in paged attention against float64, with NaN wherever no row may look."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from weft.kernels.ops.attention import cpu as attention_cpu
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention import reference as attention_reference
from weft.kernels.shared import cpu
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    eager_attention,
    exact_attention,
    hide_before_window,
    hide_first,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import PoisonedTorch
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)

WINDOWS = (1, 24, 100, 515, 5000)
"""Below and above a page, a block of positions, a segment and the longest context."""


@pytest.fixture(params=["native", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (attention_cpu, attention_reference):
        monkeypatch.setattr(module, "torch", PoisonedTorch())
    if request.param == "torch":
        monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    elif cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")


def attend(
    case: Case, window: int, first_position: int = 0, *, is_chunked: bool = False
) -> torch.Tensor:
    """The front."""
    return in_parts(paged_attention)(
        case.q,
        case.pool,
        LAYER,
        case.page_table,
        case.cu_q_lens,
        case.kv_lens,
        case.scale,
        case.max_q_len,
        case.max_kv_len,
        first_position=first_position,
        window=window,
        is_chunked=is_chunked,
    )


def check(case: Case, window: int, first_position: int = 0, *, is_chunked: bool = False) -> None:
    peer = eager_attention(case, first_position, window, is_chunked=is_chunked)
    exact = exact_attention(case, first_position, window, is_chunked=is_chunked)
    made = attend(case, window, first_position, is_chunked=is_chunked)
    assert_as_exact(made, peer, exact)


@pytest.mark.usefixtures("path")
@pytest.mark.each_of("window", "is_chunked")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_rows_attend_to_their_windows(window: int, is_chunked: bool, dtype: torch.dtype) -> None:
    fresh_seed()
    lengths = [
        (1, 1),
        (1, 130),
        (37, 37),
        (5, 64),
        (0, 12),
        (1, 1500),
        (140, 1107),
        (2, 2),
        (6, 70),
    ]
    random.shuffle(lengths)
    for geometry in (Geometry(9, 3, 64, 16), Geometry(8, 1, 72, 8)):
        case = make_case(geometry, lengths, dtype)
        hide_before_window(case, window, is_chunked=is_chunked)
        check(case, window, is_chunked=is_chunked)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("first_position", [1, 90])
def test_a_window_and_a_first_position(first_position: int) -> None:
    fresh_seed()
    lengths = [(1, 1), (1, 95), (37, 137), (5, 91), (1, 700)]
    case = make_case(Geometry(6, 2, 24, 16), lengths, torch.float32)
    hide_before_window(case, 70)
    hide_first(case, first_position)
    check(case, 70, first_position)


@pytest.mark.parametrize("window", [24, 100, 515])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_how_it_is_batched(dtype: torch.dtype, window: int) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    fresh_seed()
    case = make_case(Geometry(9, 3, 64, 16), [(150, 1200), (1, 600), (20, 20)], dtype)
    whole = attend(case, window)
    for row in (0, 1, 31, 32, 90, 149, 150, 151, 170):
        request = int(torch.searchsorted(case.cu_q_lens, row, right=True)) - 1
        behind = int(case.cu_q_lens[request + 1]) - 1 - row
        alone = case._replace(
            q=case.q[row : row + 1],
            page_table=case.page_table[request : request + 1],
            cu_q_lens=torch.tensor([0, 1], dtype=torch.int32),
            kv_lens=case.kv_lens[request : request + 1] - behind,
        )
        assert torch.equal(attend(alone, window)[0], whole[row])


def test_a_window_beyond_the_context_changes_nothing() -> None:
    fresh_seed()
    case = make_case(Geometry(6, 2, 64, 16), [(5, 200), (1, 300)], torch.float32)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 5, 300)
    without = in_parts(paged_attention)(case.q, case.pool, LAYER, *lengths)
    assert torch.equal(attend(case, 300), without)
    assert not torch.equal(attend(case, 299), without)


@pytest.mark.parametrize("window", [0, -3])
def test_an_empty_window_is_refused(window: int) -> None:
    case = make_case(Geometry(4, 2, 16, 8), [(1, 20)], torch.float32)
    with pytest.raises(ValueError, match="window"):
        attend(case, window)


@pytest.mark.full
@pytest.mark.parametrize(
    ("header", "original", "replacement"),
    [
        ("attention.h", "+ 1 - t->window - begin", "+ 2 - t->window - begin"),
        ("attention_plan.h", "job.task.first_read = first_read;", ""),
        ("attention.h", "i < hidden; i++) scores[i] = -INFINITY", "i < hidden; i++) (void)i"),
    ],
)
def test_the_check_sees_a_mutation(
    header: str, original: str, replacement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu.native_cpu() is None:
        pytest.skip(f"cc: {cpu.native_cpu_missing()}")
    native = mutated_native_cpu(tmp_path, header, original, replacement)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    case = make_case(Geometry(6, 2, 64, 16), [(5, 200), (1, 300), (2, 2)], torch.float32)
    hide_before_window(case, 43)
    with pytest.raises(AssertionError):
        check(case, 43)
