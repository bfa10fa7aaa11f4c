"""The GPU's attention kernels, by Triton's interpreter at small sizes, against float64."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.attention import triton_tiles
from weft.kernels.ops.attention.library_cudnn import is_dense
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    decode_rows,
    eager_attention,
    exact_attention,
    hide_first,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import change_kernels, kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

Lengths = list[tuple[int, int]]


def decode(
    module: ModuleType, case: Case, bound: int = 0, first: int = 0, max_rows: int = 1
) -> torch.Tensor:
    return decode_rows(
        module,
        case,
        max(bound, case.max_kv_len),
        is_uniform=bool((case.cu_q_lens.diff() == 1).all()),
        first_position=first,
        max_rows=max_rows,
    )


def extend(
    module: ModuleType, case: Case, *, has_own: bool = False, first: int = 0
) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan")).flatten(1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    own = module.OwnKv(*case.own_kv()) if has_own else None
    in_parts(partial(module.extend_attention, out))(
        case.q, case.pool, LAYER, *lengths, case.max_q_len, case.max_kv_len, own=own,
        first_position=first,
    )  # fmt: skip
    return out


def check_rows(out: torch.Tensor, case: Case, *, is_decode: bool, first: int = 0) -> None:
    """The rows of one kind of request are right, the others are not touched."""
    q_lens = case.cu_q_lens.diff().long()
    mine = ((q_lens == 1) == is_decode).repeat_interleave(q_lens)
    eager, exact = eager_attention(case, first), exact_attention(case, first)
    assert_as_exact(out[mine], eager[mine], exact[mine])
    assert out[~mine].isnan().all()


@pytest.mark.parametrize(
    ("geometry", "lengths", "dtype"),
    [
        (Geometry(3, 1, 24, 16), [(1, 1), (1, 129), (2, 40), (1, 64), (0, 5)], torch.float32),
        (Geometry(4, 4, 80, 32), [(1, 70), (1, 33)], torch.float16),
    ],
)
@pytest.mark.parametrize("bound", [0, 5000])
def test_decode(
    geometry: Geometry, lengths: Lengths, dtype: torch.dtype, bound: int, tmp_path: Path
) -> None:
    fresh_seed()
    case = make_case(geometry, lengths, dtype)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        check_rows(decode(module, case, bound), case, is_decode=True)


def test_decode_without_split_and_without_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(Geometry(2, 1, 16, 16), [(1, 40), (1, 0), (3, 9)], torch.float32)
    exact = exact_attention(case)
    assert not exact[1].any()
    with kernel_module("attention.triton_decode", tmp_path) as module:
        for splits in (1, 3):
            monkeypatch.setattr(module, "num_splits", lambda *_, splits=splits: splits)
            out = decode(module, case)
            torch.testing.assert_close(out[:2], exact[:2].float())
            assert out[2:].isnan().all()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_of_few_rows_each(
    dtype: torch.dtype, splits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a request see one another up to themselves; longer ones are not touched."""
    fresh_seed()
    lengths = [(3, 3), (1, 70), (4, 131), (0, 0), (2, 64), (5, 80), (3, 66), (1, 1), (0, 0)]
    case = make_case(Geometry(6, 2, 24, 16), lengths, dtype)
    eager, exact = eager_attention(case), exact_attention(case)
    is_few = (case.cu_q_lens.diff() <= 4).repeat_interleave(case.cu_q_lens.diff())
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        out = decode(module, case, max_rows=4)
    assert_as_exact(out[is_few], eager[is_few], exact[is_few])
    assert out[~is_few].isnan().all()


@pytest.mark.parametrize(
    ("geometry", "lengths", "dtype"),
    [
        (Geometry(2, 1, 24, 16), [(7, 7), (1, 9), (40, 77), (0, 3), (2, 50)], torch.float32),
        (Geometry(2, 2, 16, 32), [(130, 140)], torch.float16),
    ],
)
def test_extend(geometry: Geometry, lengths: Lengths, dtype: torch.dtype, tmp_path: Path) -> None:
    fresh_seed()
    case = make_case(geometry, lengths, dtype)
    with kernel_module("attention.triton_extend", tmp_path) as module:
        check_rows(extend(module, case), case, is_decode=False)
        out = extend(module, hide_own_pages(case), has_own=True)
        check_rows(out, case, is_decode=False)


@pytest.mark.parametrize("first", [1, 70])
def test_positions_before_the_first_are_not_attended_to(first: int, tmp_path: Path) -> None:
    fresh_seed()
    lengths = [(1, 1), (1, 2), (1, 129), (3, 3), (0, 5), (1, 20), (40, 75), (2, 33)]
    case = make_case(Geometry(2, 1, 24, 32), lengths, torch.float32)
    hide_first(case, first)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        check_rows(decode(module, case, first=first), case, is_decode=True, first=first)
    with kernel_module("attention.triton_extend", tmp_path) as module:
        check_rows(extend(module, case, first=first), case, is_decode=False, first=first)
        with pytest.raises(ValueError, match="first position"):
            extend(module, case, has_own=True, first=first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_one_request_of_fewer_rows_than_there_may_be(
    rows: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Of a captured step only bounds are known."""
    fresh_seed()
    case = make_case(Geometry(2, 1, 16, 16), [(rows, rows + 40)], dtype)
    eager, exact = eager_attention(case), exact_attention(case)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    with kernel_module("attention.gpu", tmp_path) as module:
        for bound in (rows, 8, 16, 64):
            out = in_parts(module.paged_attention)(case.q, case.pool, LAYER, *lengths, bound, 64)
            assert_as_exact(out, eager, exact)


@pytest.mark.parametrize(
    ("module_name", "change"),
    [
        ("decode", ("begin + length, ", "begin + length - TILE, ")),
        ("decode", ("tl.where(is_seen[None, :], scores, hidden)", "scores")),
        ("decode", ("used = tl.cdiv(tiles, ", "used = tiles // (")),
        ("decode", ("first >= kv_len - q_len", "first > kv_len - q_len")),
        ("decode", ("first < kv_len - q_len", "first < kv_len - q_len - 1")),
        ("tiles", ("position[None, :] <= last_seen", "position[None, :] < last_seen")),
        ("extend", ("range(full, common, TILE)", "range(TILE, common, TILE)")),
        ("extend", ("range(tail, end, TILE)", "range(tail, end - TILE, TILE)")),
        ("extend", ("if several else requests", "if several else 0")),
    ],
)  # fmt: skip
@pytest.mark.full
def test_the_checks_see_a_mutation(
    module_name: str, change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_decode = module_name == "decode"
    run = decode if is_decode else extend
    mutated: tuple[str, str] | None = change
    if module_name == "tiles":
        change_kernels(monkeypatch, triton_tiles, tmp_path, change)
        module_name, mutated = "extend", None
    # Enough requests for splits of several tiles.
    lengths = [(1, 250), (1, 34), *[(1, 90)] * 5] if is_decode else [(20, 100), (2, 70)]
    case = make_case(Geometry(2, 1, 16, 16), lengths, torch.float32)
    with (
        kernel_module(f"attention.triton_{module_name}", tmp_path, mutated) as module,
        pytest.raises(AssertionError),
    ):
        check_rows(run(module, case), case, is_decode=is_decode)


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(7, 7)], True),
        ([(7, 7), (7, 7)], True),
        ([(7, 8)], False),
        ([(7, 7), (7, 9)], False),
        ([(7, 7), (6, 6)], False),
        ([(7, 7), (0, 7)], False),
        ([(8, 8), (6, 6)], False),
        ([(1, 1), (1, 5)], False),
    ],
)
def test_dense_are_equal_prompts_without_context(lengths: Lengths, *, expected: bool) -> None:
    q_lens, kv_lens = zip(*lengths, strict=True)
    sizes = sum(q_lens), len(lengths), max(q_lens)
    assert is_dense(*sizes, max(kv_lens)) == expected
    assert not is_dense(*sizes, max(kv_lens) + 16)
