"""Transformers with caches that keep K and V in FP8, to compare engines with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

MARGIN = 0.02
"""Of the logits' standard deviation: what a number that is rounded to its other neighbour may
change, since both sides compute in float32 with other orders of sums."""


def rounded(vectors: torch.Tensor) -> torch.Tensor:
    """[..., D] as FP8 (e4m3) keeps them, the largest magnitude of each vector being 448."""
    scales = vectors.abs().amax(-1, keepdim=True) / 448
    inverse = torch.where(scales > 0, 1 / scales, 0)
    numbers = (vectors * inverse).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers.to(vectors.dtype) * scales


@contextmanager
def rounding_caches() -> Iterator[None]:
    """All caches of attention round what they are given."""
    from transformers import cache_utils

    with pytest.MonkeyPatch.context() as patch:
        for kind in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer):
            update = kind.update

            def round_first(
                self: Any,
                keys: torch.Tensor,
                values: torch.Tensor,
                *more: Any,
                of: Any = update,
                **named: Any,
            ) -> Any:
                return of(self, rounded(keys), rounded(values), *more, **named)

            patch.setattr(kind, "update", round_first)
        yield


def check_tokens(
    path: Path,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    *,
    device: str = "cpu",
    margin: float = MARGIN,
) -> None:
    """Fails unless each greedy token is the choice of a float32 model with such caches, or within
    `margin` of it.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    model = model.to(device).eval()
    with rounding_caches(), torch.inference_mode():
        for prompt, tokens in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt + tokens[:-1]], device=device)
            logits = model(ids, use_cache=True).logits[0, len(prompt) - 1 :].double()
            chosen = logits.gather(1, torch.tensor(tokens, device=device)[:, None])[:, 0]
            gaps = (logits.max(-1).values - chosen) / logits.std(-1)
            assert gaps.max() < margin, gaps.tolist()
