"""Draft heads: their interface, and loading from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from weft.checkpoint.draft_config import HeadKind
from weft.checkpoint.eagle_config import head_kind
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.eagle import load_eagle
from weft.engine.model.heads.eagle3 import load_eagle3
from weft.engine.model.step import Step
from weft.kernels.draft_head import DraftChains


class DraftHead(Protocol):
    """A decoder layer over a target's hidden states that drafts for that target."""

    kind: HeadKind
    hidden_size: int
    """Size of its hidden states."""
    layer: int
    """Index of the head's K and V in the pool's layers, after the target's."""
    digest: bytes
    """32 bytes over files, configuration and dtype."""
    layer_bytes: int
    """Bytes of the layer's linear weights: the cost of an adapted copy."""

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step of the target and writes the head's K and V of it.

        Args:
            target: Model for which the head was loaded.
            step: The step; `slots` must be there.
            kept: [slots + 1, hidden]: the states of each request's last row before; then of its
                last row of this step.
            pool: The target's pool, with the head's layer.

        Returns:
            [L, target's hidden], as `Model.forward`, and [T, hidden]: the target's states in the
            form that the head reads.
        """

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        """Drafts tokens behind the last ones of R requests.

        Args:
            state: [R, hidden], from `extend`, of the position before the last token; overwritten.
            token_ids: [R] int64: the last tokens.
            chains: Positions and pages of the requests, and the number of drafts.
            pool: The target's pool, with the head's layer; written.

        Returns:
            [D, R] int64: token ids of the target's vocabulary.
        """


def load_draft_head(draft_dir: Path, target: DecoderOnlyLM) -> DraftHead:
    """Loads a head in its published layout: config.json and safetensors.

    Args:
        draft_dir: The directory.
        target: The model that it drafts for, loaded; the head computes in its dtype, on its device.

    Raises:
        ModelError: The directory is incomplete or malformed, of an unsupported kind or made for
            another model.
    """
    load = load_eagle if head_kind(draft_dir) == "eagle" else load_eagle3
    return load(draft_dir, target)
