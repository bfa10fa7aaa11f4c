"""Tokens of an engine on a GPU against transformers, computing in float32 on the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

BFLOAT16_ULPS = 4
"""A first difference within so many bfloat16 steps of the larger logit is a near-tie."""


def reference_model(
    path: Path, dtype: torch.dtype = torch.float32, computes_in: torch.dtype = torch.float32
) -> torch.nn.Module:
    """Transformers' model with weights rounded to `dtype`, on the GPU."""
    from transformers import AutoModelForCausalLM

    # Grouped products of experts ask for sizes that tiny models do not have.
    is_moe = "num_experts" in json.loads((path / "config.json").read_text())
    experts = {"experts_implementation": "eager"} if is_moe else {}
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", **experts
    )
    return model.to(computes_in).cuda().eval()


@torch.inference_mode()
def reference_logits(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab]: what each of the tokens was chosen from."""
    ids = torch.tensor([prompt + tokens[:-1]], device=next(model.parameters()).device)
    return model(ids, use_cache=False).logits[0, len(prompt) - 1 :]


class Ties(NamedTuple):
    """Greedy tokens that are not the reference's choice."""

    num_tokens: int
    num_different: int
    num_far: int
    """Tokens that differ by more than a near-tie."""
    largest_ulps: float

    def check(self, *, is_moe: bool) -> None:
        """Fails unless all differences are near-ties, and few."""
        # Where two experts are equally likely, rounding decides which one is asked.
        assert self.num_far <= (0.02 * self.num_tokens if is_moe else 0), self
        assert self.num_different < 0.1 * self.num_tokens, self


def ties_of(path: Path, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> Ties:
    """Judges the tokens of an engine in bfloat16, each at its own place.

    Args:
        path: The model's directory.
        prompts: Of the answers.
        answers: Chosen greedily.
    """
    return ties_with(reference_model(path, torch.bfloat16), prompts, answers)


def ties_with(
    model: torch.nn.Module, prompts: Sequence[list[int]], answers: Sequence[list[int]]
) -> Ties:
    """`ties_of` a model in float32 whose weights are rounded to bfloat16."""
    gaps: list[float] = []
    for prompt, tokens in zip(prompts, answers, strict=True):
        logits = reference_logits(model, prompt, tokens)
        best = logits.max(dim=-1).values
        chosen = torch.tensor(tokens, device=logits.device).unsqueeze(1)
        ulp = 2.0 ** (torch.floor(torch.log2(best.abs())) - 7)
        gaps += ((best - logits.gather(1, chosen).squeeze(1)) / ulp).tolist()
    num_far = sum(gap > BFLOAT16_ULPS for gap in gaps)
    ties = Ties(len(gaps), sum(gap > 0 for gap in gaps), num_far, max(gaps))
    print(ties)
    return ties
