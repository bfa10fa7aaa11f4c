"""The GPU's matrices of adapters in the place of the model's, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from weft.testing.kernels.gpu_kernels import kernel_module
from weft.testing.kernels.kernel_checks import assert_as_exact, fresh_seed
from weft.testing.kernels.lora_cases import draw_slots, segments_of

pytestmark = pytest.mark.needs("triton-interpreter")

PLACES = (-1, 1, -1, 0, 2)
"""Matrices by slot."""


def draw(vocabulary: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Three matrices, and the slots' places."""
    matrices = torch.randn(3, vocabulary, hidden).to(dtype)
    return matrices, torch.tensor(PLACES, dtype=torch.int32)


def check_products(
    module: ModuleType,
    slots: list[int],
    vocabulary: int,
    hidden: int,
    dtype: torch.dtype,
    *,
    is_fixed: bool = False,
) -> None:
    matrices, places = draw(vocabulary, hidden, dtype)
    x, before = torch.randn(len(slots), hidden).to(dtype), torch.randn(len(slots), vocabulary)
    out, peer, exact = before.clone(), before.clone(), before.double()
    segments = segments_of(slots, len(set(slots)) + 2)
    module.replace_products(out, x, matrices, places, segments, is_fixed=is_fixed)
    for row, slot in enumerate(slots):
        if (place := PLACES[slot]) >= 0:
            peer[row] = (matrices[place] @ x[row]).float()
            exact[row] = matrices[place].double() @ x[row].double()
        else:
            assert torch.equal(out[row], before[row])
    assert_as_exact(out, peer, exact)


@pytest.mark.parametrize("tokens", [0, 1, 5, 37])
@pytest.mark.parametrize(("vocabulary", "hidden"), [(129, 72), (64, 128), (31, 33)])
def test_products(tokens: int, vocabulary: int, hidden: int, tmp_path: Path) -> None:
    fresh_seed()
    with kernel_module("replaced.triton_replaced", tmp_path) as module:
        check_products(module, draw_slots(tokens, 5), vocabulary, hidden, torch.float32)


@pytest.mark.parametrize("slots", [[0] * 7, [3] * 40, [4], [2, 2, 1]])
def test_products_of_any_adapters(slots: list[int], tmp_path: Path) -> None:
    fresh_seed()
    with kernel_module("replaced.triton_replaced", tmp_path) as module:
        check_products(module, slots, 70, 40, torch.float16, is_fixed=True)


def test_products_of_many_tokens(tmp_path: Path) -> None:
    fresh_seed()
    with kernel_module("replaced.triton_replaced", tmp_path) as module:
        check_products(module, draw_slots(150, 5), 150, 40, torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        ("range(0, K, TILE)", "range(0, K - K % TILE, TILE)"),
        ("start + tl.arange(0, TOKENS)", "start + 1 + tl.arange(0, TOKENS)"),
        ("(place * width + column", "(place * 0 + column"),
    ],
)  # fmt: skip
@pytest.mark.full
def test_the_check_sees_a_wrong_kernel(change: tuple[str, str], tmp_path: Path) -> None:
    fresh_seed()
    with (
        kernel_module("replaced.triton_replaced", tmp_path, change) as module,
        pytest.raises(AssertionError),
    ):
        check_products(module, [1, 3, 3, 0], 70, 72, torch.float32)


@pytest.mark.parametrize("tokens", [0, 1, 19])
def test_embeddings(tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_seed()
    matrices, places = draw(23, 72, torch.float32)
    slots, ids = draw_slots(tokens, 5), torch.randint(23, (tokens,))
    before = torch.randn(tokens, 72)
    out = before.clone()
    with kernel_module("replaced.triton_replaced", tmp_path) as module:
        token_slots = torch.tensor(slots, dtype=torch.int32)
        module.replace_embeddings(out, ids, matrices, places, token_slots)
    for row, slot in enumerate(slots):
        place = PLACES[slot]
        expected = before[row] if place < 0 else matrices[place, ids[row]]
        assert torch.equal(out[row], expected)
