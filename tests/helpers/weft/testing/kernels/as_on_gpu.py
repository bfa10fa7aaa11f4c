"""CPU tensors that take the ways of CUDA tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from weft.kernels import cpu


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
