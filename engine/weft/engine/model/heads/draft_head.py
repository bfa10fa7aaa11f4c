"""The interface of draft heads, and loading one from a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from weft.checkpoint.draft_config import HeadKind
from weft.checkpoint.eagle_config import head_kind
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.eagle import load_eagle
from weft.engine.model.heads.eagle3 import load_eagle3
from weft.engine.model.heads.place import HeadPlace
from weft.engine.model.step import Step
from weft.kernels.ops.draft_head.spec import DraftChains


class DraftHead(Protocol):
    """A decoder layer over a target's hidden states that drafts for that target."""

    kind: HeadKind
    hidden_size: int
    place: HeadPlace
    digest: bytes
    """32 bytes over files, configuration and dtype."""
    layer_bytes: int
    """Bytes of the layer's linear weights: the cost of an adapted copy."""

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a step of the target, and writes the head's K and V for it.

        Args:
            step: Its `slots` must not be None.
            kept: [slots + 1, hidden]: the state of each request's last row in the step before;
                overwritten with that of its last row in this step.
            pool: The target's pool, with the head's layer.

        Returns:
            [L, target's hidden], as from `Model.forward`, and [T, hidden]: the target's states in
            the form that the head reads.
        """

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        """Drafts tokens to follow the last tokens of R requests.

        Args:
            state: [R, hidden], from `extend`, of the position before the last token; overwritten.
            token_ids: [R] int64: the last tokens.
            chains: Positions and pages of the requests, and the number of drafts.
            pool: The target's pool, with the head's layer; written.

        Returns:
            [D, R] int64: token ids of the target's vocabulary.
        """


def load_draft_head(draft_dir: Path, target: DecoderOnlyLM) -> DraftHead:
    """Loads a head in its published layout: config.json and safetensors. The head computes in the
    target's dtype, on its device. Raises ModelError if the directory is incomplete or malformed, of
    an unsupported kind or made for another model.
    """
    load = load_eagle if head_kind(draft_dir) == "eagle" else load_eagle3
    return load(draft_dir, target)
