"""CPU tensors that take the ways of CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from weft.kernels.shared import cpu


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Operations on CPU tensors launch what they launch on a GPU: kernels run by Triton's
    interpreter, or are only compiled or recorded.
    """
    multiply = torch.mm

    def mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
        # Only a GPU has products of another dtype.
        return multiply(a, b).to(options.get("out_dtype", a.dtype))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", property(lambda _: True), raising=False)
        patch.setattr(cpu, "native_cpu_for", lambda _: None)
        patch.setattr(torch, "mm", mm)
        yield


def add_in_one_order(patch: pytest.MonkeyPatch) -> None:
    """Lets Triton's interpreter add the terms of every element of a product in one order, as tensor
    cores do; numpy's order depends on an element's place in its tile.
    """

    def matmul(
        a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], dtype: np.dtype[Any]
    ) -> np.ndarray[Any, Any]:
        terms = a.astype(dtype)[:, :, None] * b.astype(dtype)[None]
        return terms.sum(axis=1, dtype=dtype)

    patch.setattr(np, "matmul", matmul)
