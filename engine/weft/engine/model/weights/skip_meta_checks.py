"""Reads a checkpoint on the meta device, whose tensors have shapes and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class SkipMetaChecks(TorchFunctionMode):
    """A context in which checks of numbers pass on the meta device: all entries fulfil a condition,
    no entry breaks one, two tensors are equal, and a single number is 1.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = _ANSWERS.get(func)
        if answer is not None and args[0].is_meta:
            return answer()
        return func(*args, **(kwargs or {}))


_ANSWERS: dict[Callable[..., Any], Callable[[], Any]] = {
    torch.Tensor.all: lambda: torch.tensor(True),
    torch.Tensor.any: lambda: torch.tensor(False),
    torch.equal: lambda: True,
    torch.Tensor.item: lambda: 1.0,
    torch.Tensor.__float__: lambda: 1.0,
}
