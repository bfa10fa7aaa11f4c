"""Sinks and soft caps of attention's scores in every kernel, against float64."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.reference import paged_attention_reference
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.shared import cpu
from weft.testing.kernels.attention_cases import (
    LAYER,
    Case,
    Geometry,
    decode_rows,
    exact_attention,
    hide_own_pages,
    in_parts,
    make_case,
)
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import (
    DTYPES,
    assert_as_exact,
    fresh_seed,
    mutated_native_cpu,
)

LENGTHS = [(3, 3), (1, 1), (1, 700), (40, 90), (0, 7), (2, 66)]
WAYS = [(True, None, None), (False, 1.5, None), (True, 4.0, 24)]
"""Whether there are sinks; the soft cap; the window."""

Softmax = dict[str, Any]


def make_softmax(heads: int, way: tuple[bool, float | None, int | None]) -> Softmax:
    """Sinks far below, among and far above the scores."""
    has_sinks, softcap, window = way
    sinks = torch.randn(heads) * 3
    sinks[0], sinks[-1] = -300.0, 300.0
    return {"sinks": sinks if has_sinks else None, "softcap": softcap, "window": window}


def attend(case: Case, softmax: Softmax, *, is_reference: bool = False) -> torch.Tensor:
    arguments = (case.q, case.pool, LAYER, case.page_table, case.cu_q_lens, case.kv_lens)
    attention = paged_attention_reference if is_reference else paged_attention
    lengths = (case.scale, case.max_q_len, case.max_kv_len)
    return in_parts(attention)(*arguments, *lengths, **softmax)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_and_reference(
    dtype: torch.dtype, way: tuple[bool, float | None, int | None]
) -> None:
    """Requests that are cut into segments among them."""
    fresh_seed()
    case, softmax = make_case(Geometry(6, 2, 24, 16), LENGTHS, dtype), make_softmax(6, way)
    exact, eager = exact_attention(case, **softmax), attend(case, softmax, is_reference=True)
    # Few values are large beside sinks, so the mean error is that of few sums.
    slack = 4 * torch.finfo(dtype).eps * exact.abs().max().item()
    assert_as_exact(eager, exact.to(dtype), exact, slack=slack)
    assert_as_exact(attend(case, softmax), eager, exact, slack=slack)


@pytest.mark.full
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a->sinks[head]", "a->sinks[0]"),
        ("small = vf_exp2_nonpositive", "small = 2 * vf_exp2_nonpositive"),
    ],
)
def test_the_checks_see_a_mutation(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = mutated_native_cpu(tmp_path, "attention.h", before, after)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: native)
    with pytest.raises(AssertionError):
        test_native_and_reference(torch.float32, (True, 4.0, None))


@pytest.mark.needs("triton-interpreter")
@pytest.mark.each_of("way", "name")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["decode", "extend", "own", "fixed"])
def test_triton(
    name: str,
    way: tuple[bool, float | None, int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With and without splits, with K and V beside the pool, with fixed bits."""
    fresh_seed()
    lengths = [(3, 3), (1, 150), (1, 1), (40, 90), (2, 66)]
    case, softmax = make_case(Geometry(4, 2, 16, 16), lengths, torch.float32), make_softmax(4, way)
    exact, eager = exact_attention(case, **softmax), attend(case, softmax, is_reference=True)
    lengths = (case.page_table, case.cu_q_lens, case.kv_lens, case.scale, 40, 150)
    with kernel_module(f"attention.triton_{name.replace('own', 'extend')}", tmp_path) as module:
        if name == "decode":
            splits = random.choice((1, 3))
            monkeypatch.setattr(module, "num_splits", lambda *_: splits)
            out = decode_rows(module, case, 150, is_uniform=False, max_rows=4, **softmax)
        else:
            out = torch.full_like(case.q, float("nan")).flatten(1)
            case = hide_own_pages(case) if name == "own" else case
            options: dict[str, Any] = dict(softmax)
            if name != "fixed":
                options["own"] = module.OwnKv(*case.own_kv()) if name == "own" else None
            else:
                monkeypatch.setattr(module, "SEGMENT", 64)
                monkeypatch.setattr(module, "_PROGRAMS_PER_SM", random.choice((0, 1 << 10)))
            call = getattr(module, f"{name.replace('own', 'extend')}_attention")
            in_parts(partial(call, out))(case.q, case.pool, LAYER, *lengths, **options)
    q_lens = case.cu_q_lens.diff().long()
    least, most = {"decode": (1, 4), "fixed": (1, 40)}.get(name, (2, 40))
    mine = ((q_lens >= least) & (q_lens <= most)).repeat_interleave(q_lens)
    assert_as_exact(out[mine], eager[mine], exact[mine])


@pytest.mark.parametrize(
    "change",
    [{"softcap": 0.0}, {"sinks": torch.zeros(3)}, {"sinks": torch.zeros(2, dtype=torch.bfloat16)}],
)
def test_what_does_not_fit_is_refused(change: Softmax) -> None:
    case = make_case(Geometry(2, 1, 16, 16), [(2, 20)], torch.float32)
    assert AttentionSpec(2, 1, 16, 1.0).sinks is None
    with pytest.raises(ValueError, match=r"softcap|sinks"):
        attend(case, change)
