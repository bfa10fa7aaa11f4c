"""Transformers with caches that keep K and V in 8 bits, to compare engines with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.request import TokenLogprob
from weft.engine.loop.llm import GeneratedSample

MARGIN = 0.05
"""Of the logits' standard deviation: what a number that is rounded to its other neighbour may
change, since both sides compute in float32 with other orders of sums."""


def rounded(vectors: torch.Tensor, kept: str, *, is_latent: bool = False) -> torch.Tensor:
    """[..., D] as fp8_e4m3 or int8 keeps them; the largest magnitude of each vector becomes 448, or
    127. Latents and the keys that they share have scales in bfloat16, rounded up.
    """
    most = 448 if kept == "fp8_e4m3" else 127
    scales = vectors.abs().amax(-1, keepdim=True) / most
    if is_latent:
        near = scales.bfloat16()
        above = torch.nextafter(near, torch.full_like(near, torch.inf))
        scales = torch.where(near < scales, above, near).to(scales.dtype)
    numbers = (vectors * torch.where(scales > 0, 1 / scales, 0)).clamp(-most, most)
    numbers = numbers.to(torch.float8_e4m3fn) if most == 448 else numbers.round()
    return numbers.to(vectors.dtype) * scales


@contextmanager
def rounding_caches(kept: str, *, are_latents: bool = False) -> Iterator[None]:
    """All caches of attention round what they are given: K and V, or latents and shared keys."""
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
                both = (rounded(one, kept, is_latent=are_latents) for one in (keys, values))
                return of(self, *both, *more, **named)

            patch.setattr(kind, "update", round_first)
        yield


def check_tokens(
    path: Path,
    prompts: Sequence[list[int]],
    answers: Sequence[list[int]],
    told: Sequence[Sequence[TokenLogprob]] = (),
    kept: str = "fp8_e4m3",
) -> None:
    """Fails unless each greedy token is the choice of a float32 model with such caches, or within
    MARGIN of it.

    Args:
        path: The model's directory.
        prompts: Of the answers.
        answers: Greedy tokens.
        told: Log-probabilities of the likeliest tokens, if known: most of them must be four times
            as near to the model with such caches as to the model without.
        kept: Number format of the caches.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    are_latents = hasattr(model.config.get_text_config(), "kv_lora_rank")
    near, far = [], []
    for number, (prompt, tokens) in enumerate(zip(prompts, answers, strict=True)):
        ids, chosen = torch.tensor([prompt + tokens[:-1]]), torch.tensor(tokens)[:, None]
        with rounding_caches(kept, are_latents=are_latents), torch.inference_mode():
            logits = model(ids, use_cache=True).logits[0, len(prompt) - 1 :].double()
            own = logits.gather(1, chosen)[:, 0]
        gaps = (logits.max(-1).values - own) / logits.std(-1)
        assert gaps.max() < MARGIN, gaps.tolist()
        if told:
            with torch.inference_mode():
                exact = model(ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
            top = torch.tensor([[token for token, _ in one.top] for one in told[number]])
            found = torch.tensor([[logprob for _, logprob in one.top] for one in told[number]])
            for logits_of, errors in ((logits, near), (exact, far)):
                expected = logits_of.log_softmax(-1).gather(1, top)
                errors.append((expected - found).abs().flatten())
    if told:
        medians = torch.cat(near).median().item(), torch.cat(far).median().item()
        print("median errors with and without rounding", medians)
        assert medians[0] < 0.25 * medians[1], medians


def check_samples(
    path: Path,
    prompts: Sequence[list[int]],
    samples: Sequence[GeneratedSample],
    kept: str = "fp8_e4m3",
) -> None:
    """`check_tokens` of an engine's samples, whose log-probabilities were asked for."""
    answers = [sample.token_ids for sample in samples]
    check_tokens(path, prompts, answers, [sample.logprobs for sample in samples], kept)
