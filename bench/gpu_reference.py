"""Tokens of an engine on a GPU against transformers in float32, on the same made-up weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from weft.checkpoint.config import ModelConfig
from weft.engine.model.loader import class_of
from weft.engine.model.weights.random_weights import RandomWeights
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Weights

BF16_ULPS = 4
TOKENS_AT_ONCE = 8192
"""Most prompt tokens that the reference computes together."""


class Answer(NamedTuple):
    """A request's prompt and the tokens that the engine chose, greedily."""

    prompt: list[int]
    tokens: list[int]


@dataclass(slots=True)
class Agreement:
    """Agreement of tokens with the reference."""

    checked_requests: int = 0
    checked_tokens: int = 0
    others: int = 0
    """Checked tokens that are not the float32 reference's choice."""
    largest_gap_ulps: float = 0.0
    """Largest gap between the reference's logits of its own choice and of the token, in bfloat16
    steps.
    """
    peer_others: int = 0
    """The same of transformers in bfloat16, asked at the same places."""
    peer_largest_gap_ulps: float = 0.0

    @property
    def is_close(self) -> bool:
        """Whether no gap is above 4 bfloat16 steps, or twice that of transformers itself."""
        return self.largest_gap_ulps <= max(BF16_ULPS, 2 * self.peer_largest_gap_ulps)


class KeptWeights(RandomWeights):
    """The made-up weights once more, by transformers' names."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.tensors: dict[str, torch.Tensor] = {}

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        """Like `RandomWeights`, but keeps the tensor."""
        super().read_into(part, out)
        self.tensors[part.name] = out

    def take(self) -> dict[str, torch.Tensor]:
        """Returns all tensors, once; those of experts stacked as in transformers."""
        taken, self.tensors = self.tensors, {}
        stems = {name.split(".experts.")[0] for name in taken if ".experts." in name}
        for stem in stems:
            parts: dict[str, list[torch.Tensor]] = {"gate_up_proj": [], "down_proj": []}
            number = 0
            while (name := f"{stem}.experts.{number}.down_proj.weight") in taken:
                parts["down_proj"].append(taken.pop(name))
                pair = (name.replace("down", kind) for kind in ("gate", "up"))
                parts["gate_up_proj"].append(torch.cat([taken.pop(part) for part in pair]))
                number += 1
            for part, tensors in parts.items():
                taken[f"{stem}.experts.{part}"] = torch.stack(tensors)
        return taken


@torch.inference_mode()
def check_tokens(
    model_dir: Path, config: ModelConfig, answers: Sequence[Answer], device: str = "cuda"
) -> Agreement:
    """Compares each token with transformers' float32 logits at its place.

    Args:
        model_dir: Has config.json.
        config: The same.
        answers: As many tokens of each.
        device: Where the engine drew its weights, and the reference computes.
    """
    where = torch.device(device)
    kept = KeptWeights(where)
    class_of(config)(config, Weights(kept, PlainScheme(), torch.bfloat16, where))
    model = reference_model(model_dir, kept.take(), where)
    found = Agreement()
    by_length = sorted(answers, key=lambda answer: len(answer.prompt))
    for length, group in groupby(by_length, key=lambda answer: len(answer.prompt)):
        alike = list(group)
        together = max(1, TOKENS_AT_ONCE // length)
        for begin in range(0, len(alike), together):
            _compare(model, alike[begin : begin + together], found, where)
    return found


def _compare(
    model: torch.nn.Module, answers: Sequence[Answer], found: Agreement, device: torch.device
) -> None:
    ids = torch.tensor([prompt + tokens[:-1] for prompt, tokens in answers], device=device)
    tokens = torch.tensor([answer.tokens for answer in answers], device=device)
    count = tokens.shape[1]
    peer_logits = model(ids, use_cache=False, logits_to_keep=count).logits
    with in_float32(model):
        logits = model(ids, use_cache=False, logits_to_keep=count).logits
    for each in (logits, peer_logits):  # Else no gap would be above 0.
        assert each.isfinite().all(), "a reference's logits are not finite"
    gaps = gaps_in_ulps(logits, tokens)
    peer_gaps = gaps_in_ulps(logits, peer_logits.argmax(-1))
    found.checked_requests += len(answers)
    found.checked_tokens += tokens.numel()
    found.others += int((gaps > 0).sum())
    found.peer_others += int((peer_gaps > 0).sum())
    found.largest_gap_ulps = max(found.largest_gap_ulps, float(gaps.max()))
    found.peer_largest_gap_ulps = max(found.peer_largest_gap_ulps, float(peer_gaps.max()))


def reference_model(
    model_dir: Path, tensors: dict[str, torch.Tensor], device: torch.device
) -> torch.nn.Module:
    """Transformers' model with these weights, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model_dir)
    # On no device: the weights are there already, what is computed at construction is not.
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="eager"
        )
    missing = shell.load_state_dict(tensors, strict=False, assign=True).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    shell.tie_weights()
    rotary = type(shell.model.rotary_emb)
    shell.model.rotary_emb = rotary(config).to(device)
    model: torch.nn.Module = shell.eval()
    return model


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Makes the model's layers compute in float32, one at a time, since there may be no room for
    all in float32.
    """
    whole = [model.model.embed_tokens, model.model.norm, model.lm_head]
    tensors = {id(p): p.data for part in whole for p in part.parameters()}
    for part in whole:
        part.float()
    hooks = []
    for layer in model.model.layers:
        hooks.append(layer.register_forward_pre_hook(lambda layer, _: layer.float() and None))
        hooks.append(layer.register_forward_hook(lambda layer, *_: layer.bfloat16() and None))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for part in whole:
            for p in part.parameters():
                p.data = tensors[id(p)]


def gaps_in_ulps(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Distance of each token's logit from the largest, in bfloat16 steps of that.

    Args:
        logits: [..., vocab] float32.
        tokens: [...] int64.
    """
    best = logits.amax(-1)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return (best - chosen) / 2.0 ** (best.abs().log2().floor() - 7)
