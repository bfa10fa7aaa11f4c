"""Many random adapters of a tiny model, and the text of each after some prompts.

Texts are those of transformers with W + alpha / r B A in the place of each W. PEFT takes a second
for each dozen of adapters; tests compare some of these with it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from weft.checkpoint.adapters.digest import adapter_digest
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy
from weft.testing.models.tiny_adapters import LINEAR, PREFIX, adapter_tensors, write_adapter

ALPHA = 16
LM_HEAD = "lm_head"
MIN_GAP = 3e-4
"""Least gap between the two most likely tokens: far more than rounding changes a logit."""
RANKS = (3, 16, 20, 32)


class AdapterCards(Greedy):
    """Adapters on disk, in folders of their number, and what they make of prompts.

    Args:
        model_dir: Of the base model, with one layer and its own LM head.
        config: Its config.json.
        root: Where adapters are written.
        seed: Of everything random.
        prompts: Token ids, all of one length.
        num_new: Tokens of a text.
    """

    def __init__(
        self,
        model_dir: Path,
        config: dict[str, Any],
        root: Path,
        seed: int,
        *,
        prompts: Sequence[list[int]],
        num_new: int,
    ) -> None:
        super().__init__(model_dir)
        self._config = config
        self._root = root
        self._rng = random.Random(seed)
        self.prompts = list(prompts)
        self._num_new = num_new
        self.base = self._texts_of({}, 1)
        self.texts: list[list[str]] = []
        """Texts by content and prompt; empty: rounding might change it."""
        self.digests: list[bytes] = []

    def add(self, count: int) -> None:
        """Writes more adapters."""
        for _ in range(count):
            rank, number = self._rng.choice(RANKS), len(self.texts)
            targets = self._rng.choice((LINEAR, LINEAR, ("q_proj", "v_proj"), (LM_HEAD, "o_proj")))
            seed = self._rng.randrange(2**31)
            tensors = adapter_tensors(self._config, seed, rank=rank, targets=targets, spread=0.3)
            if LM_HEAD in targets:
                tensors |= self._head_tensors(seed, rank)
            folder = write_adapter(
                self.folder(number),
                tensors,
                r=rank,
                lora_alpha=ALPHA,
                target_modules=list(targets),
            )
            self.digests.append(adapter_digest(folder))
            self.texts.append(self._texts_of(tensors, rank))

    def folder(self, content: int) -> Path:
        """Folder of an adapter."""
        return self._root / f"content-{content}"

    def _head_tensors(self, seed: int, rank: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed + 1)
        shapes = {"A": (rank, self._config["hidden_size"]), "B": (VOCAB, rank)}
        return {
            f"{PREFIX}{LM_HEAD}.lora_{half}.weight": 0.3 * torch.randn(shape, generator=generator)
            for half, shape in shapes.items()
        }

    @torch.inference_mode()
    def _texts_of(self, tensors: dict[str, torch.Tensor], rank: int) -> list[str]:
        """The greedy texts after all prompts."""
        with self._changed(tensors, ALPHA / rank):
            tokens, cache = torch.tensor(self.prompts), None
            found: list[torch.Tensor] = []
            least = torch.full((len(self.prompts),), torch.inf)
            for _ in range(self._num_new):
                out = self._model(tokens, past_key_values=cache, use_cache=True)
                cache, best = out.past_key_values, out.logits[:, -1].topk(2)
                least = torch.minimum(least, best.values[:, 0] - best.values[:, 1])
                tokens = best.indices[:, :1]
                found.append(tokens)
        ids = torch.cat(found, 1).tolist()
        return [
            self.text(row) if gap > MIN_GAP else ""
            for row, gap in zip(ids, least.tolist(), strict=True)
        ]

    @contextmanager
    def _changed(self, tensors: dict[str, torch.Tensor], scaling: float) -> Iterator[None]:
        """The model with an adapter's products added to its weights."""
        kept: dict[str, torch.Tensor] = {}
        for name, a in tensors.items():
            if ".lora_A." not in name:
                continue
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            weight = self._model.get_parameter(f"{module}.weight")
            kept[module] = weight.clone()
            weight += scaling * (tensors[name.replace(".lora_A.", ".lora_B.")] @ a)
        try:
            yield
        finally:
            for module, weight in kept.items():
                self._model.get_parameter(f"{module}.weight").copy_(weight)
