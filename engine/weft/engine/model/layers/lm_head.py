"""The language-model head."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.kernels.linear import LinearWeight, PlainForm, linear, weight_rows
from weft.kernels.lora import LoraAddition


class LMHead:
    """The language-model head: hidden states to logits."""

    def __init__(self, weight: LinearWeight) -> None:
        self.weight = weight

    def __call__(self, hidden: torch.Tensor, lora: LoraAddition | None = None) -> torch.Tensor:
        """[L, hidden] -> [L, vocab] float32, with what these L tokens' adapters add."""
        return linear(hidden, self.weight, out_dtype=torch.float32, lora=lora)

    def part(self, tokens: slice) -> LinearWeight | None:
        """The weight of consecutive tokens; None: this form has no parts."""
        w = self.weight
        if not isinstance(w.form, PlainForm) or w.bias is not None:
            return None
        size = tokens.stop - tokens.start
        return replace(w, out_features=size, form=PlainForm(w.form.data[tokens]))

    def rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A copy of the weight's rows [N, hidden] of N tokens, ids [N] int64 on its device."""
        return weight_rows(self.weight, token_ids)
