"""Sliding windows in the GPU's attention kernels, by Triton's interpreter, against float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops.attention import triton_tiles
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    decode_rows,
    eager_attention,
    exact_attention,
    hide_before_window,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import change_kernels, kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")

Lengths = list[tuple[int, int]]


def decode(
    module: ModuleType, case: Case, window: int, max_rows: int = 1, *, is_chunked: bool = False
) -> torch.Tensor:
    is_uniform = bool((case.cu_q_lens.diff() == 1).all())
    options = {"is_uniform": is_uniform, "max_rows": max_rows, "window": window}
    options["is_chunked"] = is_chunked
    return decode_rows(module, case, 5000, **options)


def extend(
    module: ModuleType,
    case: Case,
    window: int,
    *,
    has_own: bool = False,
    is_chunked: bool = False,
) -> torch.Tensor:
    out = torch.full_like(case.q, float("nan")).flatten(1)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    own = module.OwnKv(*case.own_kv()) if has_own else None
    in_parts(partial(module.extend_attention, out))(
        case.q, case.pool, LAYER, *lengths, case.max_q_len, case.max_kv_len, own=own,
        window=window, is_chunked=is_chunked,
    )  # fmt: skip
    return out


def fixed(
    module: ModuleType,
    case: Case,
    window: int,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_chunked: bool = False,
) -> torch.Tensor:
    """In small segments, each of a program of its own or not."""
    out = torch.full_like(case.q, float("nan")).flatten(1)
    monkeypatch.setattr(module, "SEGMENT", 128)
    monkeypatch.setattr(module, "_PROGRAMS_PER_SM", random.choice((0, 1 << 10)))
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, case.max_q_len, 500)
    attention = in_parts(partial(module.fixed_attention, out))
    attention(case.q, case.pool, LAYER, *lengths, window=window, is_chunked=is_chunked)
    return out


def make_hidden(
    geometry: Geometry,
    lengths: Lengths,
    dtype: torch.dtype,
    window: int,
    *,
    is_chunked: bool = False,
) -> tuple[Case, torch.Tensor, torch.Tensor]:
    """With NaN before the windows; torch's own result and the exact one."""
    case = make_case(geometry, lengths, dtype)
    hide_before_window(case, window, is_chunked=is_chunked)
    eager = eager_attention(case, window=window, is_chunked=is_chunked)
    return case, eager, exact_attention(case, window=window, is_chunked=is_chunked)


def check_rows(
    out: torch.Tensor, case: Case, least: int, most: int, eager: torch.Tensor, exact: torch.Tensor
) -> None:
    """The rows of requests of so many are right, the others are not touched."""
    q_lens = case.cu_q_lens.diff().long()
    mine = ((q_lens >= least) & (q_lens <= most)).repeat_interleave(q_lens)
    assert_as_exact(out[mine], eager[mine], exact[mine])
    assert out[~mine].isnan().all()


@pytest.mark.parametrize(
    ("window", "splits", "dtype"),
    [
        (1, 3, torch.float32),
        (24, None, torch.float32),
        (24, 3, torch.float16),
        (67, 1, torch.float16),
        (67, 3, torch.float32),
        (5000, 3, torch.float16),
    ],
)
def test_decode(
    window: int,
    splits: int | None,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows below and above a page, a tile, a split and the longest context."""
    fresh_seed()
    lengths = [(1, 1), (3, 3), (1, 129), (4, 131), (0, 5), (5, 180), (2, 66)]
    case, *expected = make_hidden(Geometry(4, 2, 24, 16), lengths, dtype, window)
    with kernel_module("attention.triton_decode", tmp_path) as module:
        if splits is not None:
            monkeypatch.setattr(module, "num_splits", lambda *_: splits)
        check_rows(decode(module, case, window), case, 1, 1, *expected)
        check_rows(decode(module, case, window, max_rows=4), case, 1, 4, *expected)


@pytest.mark.parametrize(
    "window", [67, *(pytest.param(one, marks=pytest.mark.full) for one in (8, 100))]
)
def test_chunks(window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks below and above a page, a tile and the rows of a program, in all three kernels."""
    fresh_seed()
    lengths = [(1, 1), (3, 3), (1, 129), (4, 131), (0, 5), (70, 177), (2, 66), (60, 60)]
    geometry = Geometry(2, 1, 24, 16)
    made = make_hidden(geometry, lengths, torch.float32, window, is_chunked=True)
    case, *expected = made
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda *_: 3)
        out = decode(module, case, window, max_rows=4, is_chunked=True)
        check_rows(out, case, 1, 4, *expected)
        check_rows(decode(module, case, window, is_chunked=True), case, 1, 1, *expected)
    with kernel_module("attention.triton_extend", tmp_path) as module:
        check_rows(extend(module, case, window, is_chunked=True), case, 2, 1000, *expected)
        hidden = hide_own_pages(case)
        out = extend(module, hidden, window, has_own=True, is_chunked=True)
        check_rows(out, case, 2, 1000, *expected)
    with kernel_module("attention.triton_fixed", tmp_path) as module:
        out = fixed(module, case, window, monkeypatch, is_chunked=True)
        assert_as_exact(out, *expected)


def test_decode_splits_what_is_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the context is."""
    case = make_case(Geometry(2, 1, 16, 16), [(1, 40)], torch.float32)
    tiles = []
    with kernel_module("attention.triton_decode", tmp_path) as module:
        monkeypatch.setattr(module, "num_splits", lambda pairs, count, _: tiles.append(count) or 1)
        tile = module.launch_config(torch.float32, 16, 1).tile
        decode(module, case, 10)
        decode(module, case, 10_000)
    assert set(tiles) == {2, -(-5000 // tile)}


@pytest.mark.parametrize("window", [1, 24, 67])
@pytest.mark.parametrize(
    ("geometry", "lengths", "dtype"),
    [
        (Geometry(2, 1, 24, 16), [(7, 7), (1, 9), (70, 177), (0, 3), (2, 150)], torch.float32),
        (Geometry(2, 2, 16, 32), [(130, 340)], torch.float16),
    ],
)
def test_extend(
    geometry: Geometry, lengths: Lengths, dtype: torch.dtype, window: int, tmp_path: Path
) -> None:
    fresh_seed()
    case, *expected = make_hidden(geometry, lengths, dtype, window)
    with kernel_module("attention.triton_extend", tmp_path) as module:
        check_rows(extend(module, case, window), case, 2, 1000, *expected)
        out = extend(module, hide_own_pages(case), window, has_own=True)
        check_rows(out, case, 2, 1000, *expected)


@pytest.mark.usefixtures("even_products")
@pytest.mark.parametrize(("window", "dtype"), [(24, torch.float32), (90, torch.float16)])
def test_fixed_rows_are_the_same_bits_however_they_come(
    window: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh_seed()
    lengths = [(60, 300), (1, 0), (1, 70), (0, 5), (1, 1)]
    case, *expected = make_hidden(Geometry(3, 1, 24, 16), lengths, dtype, window)
    with kernel_module("attention.triton_fixed", tmp_path) as module:
        whole = fixed(module, case, window, monkeypatch)
        assert_as_exact(whole, *expected)
        begin = 0
        while begin < 60:
            end = min(60, begin + random.choice((1, 7, 30, 48)))
            piece = case._replace(
                q=case.q[begin:end].contiguous(),
                page_table=case.page_table[:1],
                cu_q_lens=torch.tensor([0, end - begin], dtype=torch.int32),
                kv_lens=torch.tensor([240 + end], dtype=torch.int32),
            )
            assert torch.equal(fixed(module, piece, window, monkeypatch), whole[begin:end])
            begin = end


@pytest.mark.parametrize("name", ["decode", "extend"])
def test_a_first_position_beside_a_window_is_refused(name: str, tmp_path: Path) -> None:
    case = make_case(Geometry(2, 1, 16, 16), [(2, 20)], torch.float32)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 2, 20)
    rest = {"is_uniform": False} if name == "decode" else {"own": None}
    rest |= {"first_position": 1, "window": 5}
    with kernel_module(f"attention.triton_{name}", tmp_path) as module:
        attend = in_parts(partial(getattr(module, f"{name}_attention"), torch.empty(2, 32)))
        with pytest.raises(ValueError, match="first position"):
            attend(case.q, case.pool, LAYER, *lengths, **rest)


@pytest.mark.parametrize(
    ("name", "change", "has_own"),
    [
        ("decode", ("kv_len - q_len + 1 - FORM.window", "kv_len - q_len - FORM.window"), False),
        ("decode", ("walk = first_seen // TILE", "walk = TILE + first_seen // TILE"),
         False),
        ("decode", ("<= at[:, None] - FORM.window", "< at[:, None] - FORM.window"),
         False),
        ("decode", ("tl.cdiv(kv_len - walk, TILE)\n    used",
                              "tl.cdiv(kv_len - walk, 2 * TILE)\n    used"), False),
        ("tiles", ("> at[:, None] - FORM.window", ">= at[:, None] - FORM.window"),
         False),
        ("tiles", ("tl.maximum(at + 1 - FORM.window, 0)", "tl.maximum(at - FORM.window, 0)"),
         True),
        ("tiles", ("at + rows - FORM.window", "at + 1 - FORM.window"), True),
    ],
)  # fmt: skip
@pytest.mark.full
def test_the_checks_see_a_mutation(
    name: str,
    change: tuple[str, str],
    has_own: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_decode = name == "decode"
    mutated: tuple[str, str] | None = change
    if name == "tiles":
        change_kernels(monkeypatch, triton_tiles, tmp_path, change)
        name, mutated = "extend", None
    lengths = [(2, 133), (1, 250), (1, 90)] if is_decode else [(90, 290), (20, 120)]
    case, *expected = make_hidden(Geometry(2, 1, 16, 16), lengths, torch.float32, 43)
    with kernel_module(f"attention.triton_{name}", tmp_path, mutated) as module:
        if is_decode:
            out = decode(module, case, 43, max_rows=2)
        else:
            case = hide_own_pages(case) if has_own else case
            out = extend(module, case, 43, has_own=has_own)
    with pytest.raises(AssertionError):
        check_rows(out, case, 1 if is_decode else 2, 2 if is_decode else 1000, *expected)


@pytest.mark.parametrize(
    "change",
    [
        ("walk = first // TILE * TILE", "walk = TILE + first // TILE * TILE"),
        ("tl.minimum(full, segment_end), TILE", "tl.minimum(full, segment_end) - TILE, TILE"),
        ("first_segment = first // SEGMENT", "first_segment = 1 + first // SEGMENT"),
        ("cached + begin, Q_ROWS, common, 0", "cached + begin, 1, common, 0"),
    ],
)
@pytest.mark.full
def test_the_checks_of_fixed_rows_see_a_mutation(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, *expected = make_hidden(Geometry(2, 1, 16, 16), [(70, 290)], torch.float16, 100)
    with kernel_module("attention.triton_fixed", tmp_path, change) as module:
        monkeypatch.setattr(random, "choice", lambda values: values[0])
        out = fixed(module, case, 100, monkeypatch)
    with pytest.raises(AssertionError):
        assert_as_exact(out, *expected)
