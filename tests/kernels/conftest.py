"""Fixtures of kernel tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


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
