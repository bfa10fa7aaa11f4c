"""Checks the timed tokens against one float32 run of transformers over all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from weft.checkpoint.config import ModelConfig
from weft.engine.model.adapters.formats import read_adapter

from serving.answers import Answer
from serving.systems import load_transformers

NEAR_TIE_ULPS = 4
"""In bfloat16: distance from the largest float32 logit up to which a token counts as right."""
NEAR_TIE_FLOAT32 = 1e-3
"""In float32: the same as an absolute gap of logits."""


@dataclass(slots=True)
class Verdict:
    """Tokens of one or more answers."""

    exact: int = 0
    """Greedy tokens of the float32 model, given what came before."""
    near_ties: int = 0
    """Tokens that are not the most likely ones, but equally good."""
    wrong: int = 0
    missing: int = 0
    """Answers whose length is wrong, or whose text stands for no tokens; counted in tokens."""
    furthest: float = 0.0
    """Largest distance of a token from the largest logit, as a share of what counts as a near tie.
    """

    def add(self, other: Verdict) -> None:
        """Adds another's counts."""
        self.exact += other.exact
        self.near_ties += other.near_ties
        self.wrong += other.wrong
        self.missing += other.missing
        self.furthest = max(self.furthest, other.furthest)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong or missing."""
        return self.wrong == 0 and self.missing == 0


class Checker:
    """Judges answers; equal answers are judged once."""

    def __init__(
        self, model_dir: Path, dtype: str, tokenizer: Tokenizer, adapter: Path | None = None
    ) -> None:
        """Loads the float32 model.

        Args:
            model_dir: Hugging Face directory.
            dtype: What the answers were computed in.
            tokenizer: The model's.
            adapter: Of all answers: a PEFT folder with LoRA on the layers' projections.
        """
        self._model = load_transformers(model_dir, "float32")
        if adapter is not None:
            _merge(self._model, model_dir, adapter)
        self._is_float32 = dtype == "float32"
        self._tokenizer = tokenizer
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], Verdict] = {}

    def check(
        self, prompt: list[int], answer: Answer, num_tokens: int, others: Iterable[list[int]]
    ) -> Verdict:
        """Checks one answer.

        Args:
            prompt: Its prompt.
            answer: Tokens or text.
            num_tokens: How many were asked for.
            others: Tokens of other systems for the prompt; a text is first looked for there.
        """
        tokens = answer.token_ids
        if tokens is None:
            tokens = self._tokens_of(answer.text or "", num_tokens, others)
        if tokens is None or len(tokens) != num_tokens:
            return Verdict(missing=num_tokens)
        key = (tuple(prompt), tuple(tokens))
        if key not in self._known:
            self._known[key] = self._judge(prompt, tokens)
        return self._known[key]

    def _judge(self, prompt: list[int], tokens: list[int]) -> Verdict:
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self._model(ids, logits_to_keep=len(tokens)).logits[0].float()
        largest = logits.max(dim=-1).values
        gap = largest - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        if self._is_float32:
            allowed = torch.full_like(gap, NEAR_TIE_FLOAT32)
        else:
            # A bfloat16 has 8 significant bits: frexp gives x = m * 2^e with m in [1/2, 1).
            exponent = torch.frexp(largest.abs()).exponent
            allowed = NEAR_TIE_ULPS * torch.ldexp(torch.ones_like(gap), exponent - 8)
        exact = int((gap == 0).sum())
        near = int(((gap > 0) & (gap <= allowed)).sum())
        furthest = float((gap / allowed).max())
        return Verdict(exact, near, len(tokens) - exact - near, furthest=furthest)

    def _tokens_of(
        self, text: str, num_tokens: int, others: Iterable[list[int]]
    ) -> list[int] | None:
        """Tokens that a text stands for."""
        for tokens in others:
            if self._decode(tokens) == text:
                return tokens
        tokens = list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return tokens if len(tokens) == num_tokens and self._decode(tokens) == text else None

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


@torch.no_grad()
def _merge(model: Any, model_dir: Path, folder: Path) -> None:
    """Adds an adapter's products to the weights of a model of transformers."""
    adapter = read_adapter(folder, ModelConfig.load(model_dir), max_rank=512)
    for (layer, kind), pair in adapter.modules.items():
        part = "self_attn" if kind in ("q", "k", "v", "o") else "mlp"
        weight = model.get_parameter(f"model.layers.{layer}.{part}.{kind}_proj.weight")
        weight += pair.b.float() @ pair.a.float()
