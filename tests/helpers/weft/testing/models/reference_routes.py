"""Experts that transformers' routers choose."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


@torch.inference_mode()
def reference_routes(reference: Any, tokens: Sequence[int]) -> dict[int, NDArray[np.int64]]:
    """What each layer's experts were asked for: [tokens, k] in ascending order, by layer."""
    found: dict[int, NDArray[np.int64]] = {}
    hooks = []
    for name, module in reference.named_modules():
        if type(module).__name__.endswith("Experts"):
            (layer,) = map(int, re.findall(r"layers\.(\d+)\.", name))

            def note(_: Any, given: tuple[Any, ...], of: dict[str, Any], at: int = layer) -> None:
                (ids,) = (
                    one
                    for one in (*given, *of.values())
                    if isinstance(one, torch.Tensor) and one.dtype == torch.int64
                )
                found[at] = ids.view(len(tokens), -1).sort(dim=1).values.numpy()

            hooks.append(module.register_forward_pre_hook(note, with_kwargs=True))
    reference(torch.tensor([list(tokens)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found
