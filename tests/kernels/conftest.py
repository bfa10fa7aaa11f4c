"""Fixtures of kernel tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _threads() -> Iterator[None]:
    """Native operations divide their work, also beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(max(before, 2))
    yield
    torch.set_num_threads(before)


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of Triton's interpreter are alike wherever in a tile a row is, as on tensor cores.

    It leaves them to numpy's BLAS, which may sum the last rows of a tile in another order (OpenBLAS
    on an AMD EPYC does).
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        left, right = (side.data.astype(d.data.dtype) for side in (a, b))
        products = left[..., :, None, :] * np.swapaxes(right, -1, -2)[..., None, :, :]
        return interpreter.TensorHandle(products.sum(axis=-1) + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
