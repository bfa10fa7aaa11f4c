"""Rows of tables by slot: by single operations, and by the GPU's kernels, which Triton's
interpreter runs, against plain loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.kernels.ops import slot_rows
from weft.kernels.ops.slot_rows import triton_rows as gpu_slot_rows
from weft.testing.kernels.gpu_kernels import change_kernels, notices
from weft.testing.kernels.kernel_checks import fresh_seed

pytestmark = pytest.mark.needs("triton-interpreter")
MODULES = pytest.mark.parametrize("module", [slot_rows, gpu_slot_rows], ids=["reference", "gpu"])


@MODULES
def test_rows_of_tables_of_all_kinds(module: ModuleType) -> None:
    fresh_seed()
    states = torch.randn(7, 2100).bfloat16()
    pages = torch.randint(0, 99, (7, 40), dtype=torch.int32)[:, :37]
    tokens = torch.randint(0, 1 << 40, (7,))
    rows = torch.tensor([6, 0, 3, 3])
    found = module.take_rows(rows, pages, states, tokens)
    for table, taken in zip((pages, states, tokens), found, strict=True):
        assert taken.dtype == table.dtype
        assert torch.equal(taken, torch.stack([table[row] for row in rows]))
    assert [one.shape[0] for one in module.take_rows(rows[:0], pages, tokens)] == [0, 0]


@MODULES
def test_rows_are_put_elsewhere(module: ModuleType) -> None:
    fresh_seed()
    source, to = torch.randn(5, 1030).half(), torch.randn(6, 1030).half()
    wanted = to.clone()
    for to_row, row in ((4, 0), (1, 3), (5, 3)):
        wanted[to_row] = source[row]
    module.put_rows(to, torch.tensor([4, 1, 5]), source, torch.tensor([0, 3, 3]))
    assert torch.equal(to, wanted)


def test_other_rows_are_refused() -> None:
    rows, odd = torch.tensor([0]), torch.zeros(2, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match="no words of 4 bytes"):
        gpu_slot_rows.take_rows(rows, odd)
    with pytest.raises(ValueError, match="4 tables"):
        gpu_slot_rows.take_rows(rows, *[rows] * 4)
    with pytest.raises(ValueError, match="do not fit"):
        gpu_slot_rows.put_rows(odd, rows, torch.zeros(2, 4, dtype=torch.float16), rows)


@pytest.mark.parametrize("check", [test_rows_of_tables_of_all_kinds, test_rows_are_put_elsewhere])
@pytest.mark.parametrize(
    "change",
    [
        ("range(0, width, BLOCK)", "range(0, width - BLOCK, BLOCK)"),
        ("mask = column < width", "mask = column < width - 1"),
    ],
)
@pytest.mark.full
def test_a_mutated_kernel_is_noticed(
    check: Callable[[ModuleType], None],
    change: tuple[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change_kernels(monkeypatch, gpu_slot_rows, tmp_path, change)
    assert notices(lambda: check(gpu_slot_rows))
