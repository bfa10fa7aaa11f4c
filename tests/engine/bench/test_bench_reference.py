"""The reference of the engine's benchmark on a GPU: what it must not take for agreement."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[3] / "bench"
VOCAB = 8


class Model:
    """Has the logits it is given, first those in bfloat16; no layers."""

    def __init__(self, *logits: torch.Tensor) -> None:
        self._logits = list(logits)
        nothing = torch.nn.Identity()
        self.model = SimpleNamespace(embed_tokens=nothing, norm=nothing, layers=[])
        self.lm_head = nothing

    def __call__(self, ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits.pop(0))


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("gpu_reference")


@pytest.mark.parametrize("which", [0, 1], ids=["bfloat16", "float32"])
def test_references_that_are_not_numbers_agree_with_nobody(
    reference: ModuleType, which: int
) -> None:
    answers = [reference.Answer([1, 2], [3, 4])]
    logits = [torch.randn(1, 2, VOCAB) for _ in range(2)]
    found = reference.Agreement()
    reference._compare(Model(*logits), answers, found, torch.device("cpu"))
    assert found.checked_tokens == 2
    logits[which][0, 1, 5] = math.nan
    with pytest.raises(AssertionError, match="finite"):
        reference._compare(Model(*logits), answers, found, torch.device("cpu"))
