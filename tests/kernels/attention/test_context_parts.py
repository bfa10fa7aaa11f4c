"""Attention to contexts that are cut into parts, by Triton's interpreter, against float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
import torch
import triton.language as tl
from weft.kernels.ops.attention import triton_parts as context_parts
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import SeveralRows
from weft.kernels.ops.attention.triton_parts import MAX_PARTS, make_parts
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    exact_attention,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import change_kernels, kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed

LENGTHS = [(3, 3), (40, 300), (1, 90), (0, 5), (130, 420), (7, 7), (2, 70), (5, 37), (33, 100)]


def check_extend(
    case: Case,
    folder: Path,
    *,
    has_own: bool,
    softcap: float,
    sinks: bool,
    several: SeveralRows | None = None,
) -> None:
    """Rows of requests that bring several are right, others are not touched."""
    own_sinks = torch.randn(case.q.shape[1]) * 3 if sinks else None
    softmax = {"sinks": own_sinks, "softcap": softcap or None}
    arguments = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale)
    eager = in_parts(paged_attention_reference)(
        case.q, case.pool, LAYER, *arguments, case.max_q_len, case.max_kv_len, **softmax
    )
    exact = exact_attention(case, **softmax)
    out = torch.full_like(case.q, float("nan")).flatten(1)
    case = hide_own_pages(case) if has_own else case
    with kernel_module("attention.triton_extend", folder) as module:
        in_parts(partial(module.extend_attention, out))(
            case.q, case.pool, LAYER, *arguments, case.max_q_len, case.max_kv_len,
            own=module.OwnKv(*case.own_kv()) if has_own else None, several=several, **softmax,
        )  # fmt: skip
    lens = case.cu_q_lens.diff().long()
    mine = (lens > 1).repeat_interleave(lens)
    assert_as_exact(out[mine], eager[mine], exact[mine])
    assert out[~mine].isnan().all()


def use_parts(patch: pytest.MonkeyPatch, count: int, positions: int) -> None:
    """Cuts contexts into at most `count` parts, none of which is shorter than `positions`."""

    def fixed(q: torch.Tensor, *_: int) -> context_parts.Parts:
        shape = (count, *q.shape)
        nothing = torch.full(shape, float("nan")), torch.full((*shape[:3], 2), float("nan"))
        return context_parts.Parts(count, *nothing)

    patch.setattr(context_parts, "make_parts", fixed)
    patch.setattr(context_parts, "MIN_POSITIONS", tl.constexpr(positions))


@pytest.mark.needs("triton-interpreter")
@pytest.mark.each_of("softmax", "has_own", "dtype")
@pytest.mark.parametrize("softmax", [(0.0, False), (1.5, True)])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parts_give_what_whole_contexts_give(
    dtype: torch.dtype,
    has_own: bool,
    softmax: tuple[float, bool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one step some contexts have one part and others several, and some parts have no tile."""
    fresh_seed()
    use_parts(monkeypatch, random.choice((2, 3, 8)), random.choice((16, 40, 100)))
    # Pages shorter and longer than tiles.
    case = make_case(Geometry(4, 2, 24, random.choice((16, 128))), LENGTHS, dtype)
    check_extend(case, tmp_path, has_own=has_own, softcap=softmax[0], sinks=softmax[1])


@pytest.mark.needs("triton-interpreter")
@pytest.mark.each_of("has_own", "has_parts")
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("has_parts", [False, True])
def test_prompts_come_after_decodes(
    has_own: bool, has_parts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs are launched for a bound of requests behind the decodes; padding follows."""
    fresh_seed()
    if has_parts:
        use_parts(monkeypatch, 3, 40)
    decodes = [(1, random.randint(1, 90)) for _ in range(random.randrange(40))]
    prompts = [(rows, rows + random.randrange(200)) for rows in random.sample(range(2, 70), 3)]
    prompts.insert(random.randrange(4), (1, 30))
    lengths = [*decodes, *prompts, *[(0, 0)] * random.randrange(9)]
    case = make_case(Geometry(2, 1, 16, 16), lengths, torch.float32)
    first = torch.tensor([len(decodes)], dtype=torch.int32)
    several = SeveralRows(first, len(prompts) + random.randrange(3))
    check_extend(case, tmp_path, has_own=has_own, softcap=0.0, sinks=False, several=several)


@pytest.mark.needs("triton-interpreter")
@pytest.mark.parametrize(
    "change",
    [
        ("total = total * keep", "total = total"),
        ("parts == 1", "parts == 3"),
        ("tl.cast(part, tl.int64) * tokens", "tl.cast(part, tl.int64)"),
    ],
)
@pytest.mark.full
def test_the_checks_see_a_mutation(
    change: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_parts(monkeypatch, 3, context_parts.MIN_POSITIONS.value)
    change_kernels(monkeypatch, context_parts, tmp_path, change)
    case = make_case(Geometry(2, 1, 16, 16), [(3, 1300), (1, 20), (40, 1900)], torch.float32)
    with pytest.raises(AssertionError):
        check_extend(case, tmp_path, has_own=True, softcap=0.0, sinks=False)


@pytest.mark.parametrize(
    ("programs", "most_waves"),
    # An H200 runs 264 programs at once. Contexts stay whole where these suffice to fill it.
    [(256, 1), (132, 0.5), (33, 0.125), (288, 1.25), (1056, 4), (2000, 8)],
)
def test_a_gpu_is_busy_for_a_short_time(programs: int, most_waves: float) -> None:
    q = torch.empty((64, 4, 16))
    parts = make_parts(q, programs, 264)
    count = 1 if parts is None else parts.number
    assert count <= MAX_PARTS
    assert -(-programs * count // 264) / count <= most_waves


def test_what_parts_leave_has_bounded_memory() -> None:
    for tokens in (1, 100, 500, 1000, 4000):
        parts = make_parts(torch.empty((tokens, 32, 128), device="meta"), 8, 264)
        if parts is not None:
            assert parts.mixed.numel() * 4 <= 64 << 20
