"""Reinterpretation of numbers as bits, since numpy has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

_INTEGERS = {2: torch.int16, 4: torch.int32}
"""Integer dtypes by size in bytes."""


def words_of(values: torch.Tensor) -> npt.NDArray[Any]:
    """The bits of a CPU tensor's numbers (float32, float16 or bfloat16), as a view of the same
    memory.
    """
    words: npt.NDArray[Any] = values.view(_INTEGERS[values.element_size()]).numpy()
    return words
