"""The target as the training sees it: transformers' model, frozen, with the states it passes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Rope = tuple[torch.Tensor, torch.Tensor]
"""cos and sin, each [tokens, head_dim], of positions."""


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs the draft reads, as published heads have it."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True)
class TargetStates:
    """What one forward of the target gives."""

    aux: torch.Tensor
    """[rows, tokens, 3 * hidden]: the residual stream entering the three layers."""
    last: torch.Tensor
    """[rows, tokens, hidden]: normalised, as the LM head takes it."""


class Target:
    """A causal language model of transformers.

    Args:
        model_dir: Hugging Face directory.
        dtype: Of its weights and states.
        device: Where it runs.
        aux_layers: Whose inputs are kept; None: those of published heads.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        aux_layers: Sequence[int] | None = None,
    ) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=dtype, attn_implementation="sdpa"
        )
        self._model = model.to(device).eval().requires_grad_(False)
        self.config = self._model.config
        self.device = device
        self._decoder = self._model.get_decoder()
        self.aux_layers = tuple(aux_layers or default_aux_layers(len(self._decoder.layers)))
        self._entering: dict[int, torch.Tensor] = {}
        for index in set(self.aux_layers):
            self._decoder.layers[index].register_forward_pre_hook(self._keep(index))

    def _keep(self, index: int) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            self._entering[index] = args[0]

        return hook

    @property
    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]."""
        weight: torch.Tensor = self._model.get_input_embeddings().weight
        return weight

    @property
    def lm_head(self) -> torch.Tensor:
        """[vocab, hidden]."""
        weight: torch.Tensor = self._model.get_output_embeddings().weight
        return weight

    def states(self, ids: torch.Tensor) -> TargetStates:
        """Runs the model over token ids [rows, tokens]; padding stands on the right."""
        with torch.no_grad():
            # Nothing attends to what comes after it, so padding on the right needs no mask.
            last = self._decoder(input_ids=ids, use_cache=False).last_hidden_state
        aux = torch.cat([self._entering[index] for index in self.aux_layers], dim=-1)
        self._entering.clear()
        return TargetStates(aux, last)

    def rope(self, start: int, end: int) -> Rope:
        """The target's own rotary embedding of positions start to end - 1, float32."""
        positions = torch.arange(start, end, device=self.device)[None]
        probe = torch.zeros(1, device=self.device)
        cos, sin = self._decoder.rotary_emb(probe, positions)
        return cos[0], sin[0]
