"""The draft head of the last stage, as the stages before it have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from weft.checkpoint.draft_config import HeadKind
from weft.checkpoint.eagle3_config import Eagle3Config, load_head_config
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.mtp import MtpHead
from weft.engine.model.heads.place import HeadPlace, place_of_head
from weft.engine.model.step import Step
from weft.kernels.ops.draft_head.spec import DraftChains
from weft.kernels.ops.stream.taps import Taps


class HeadElsewhere:
    """A `DraftHead` without weights: its entries have room in the pages, and the states that it
    reads go on with the stream.

    Args:
        aux_layers: Layers of the target whose inputs the head reads.
    """

    digest = b""
    layer_bytes = 0

    def __init__(
        self, kind: HeadKind, hidden_size: int, place: HeadPlace, aux_layers: Sequence[int] = ()
    ) -> None:
        self.kind, self.hidden_size, self.place = kind, hidden_size, place
        self._aux_layers = aux_layers

    def extend(
        self, target: DecoderOnlyLM, step: Step, kept: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        taps, tokens = None, step.token_ids
        if self._aux_layers:
            shape = len(tokens), len(self._aux_layers) * target.config.hidden_size
            out = torch.empty(shape, dtype=target.dtype, device=tokens.device)
            taps = Taps(self._aux_layers, out)
        hidden = target.forward(step, pool, taps)
        return hidden, hidden.new_empty((0, self.hidden_size))

    def chain(
        self, state: torch.Tensor, token_ids: torch.Tensor, chains: DraftChains, pool: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError("the last stage drafts")


def eagle_elsewhere(draft_dir: Path, target: DecoderOnlyLM) -> HeadElsewhere:
    """Raises ModelError as `load_draft_head`, but reads config.json alone."""
    config = load_head_config(draft_dir)
    config.check_target(target.config, draft_dir)
    place = place_of_head(config, target)
    if isinstance(config, Eagle3Config):
        layers = config.layers_of(target.config)
        return HeadElsewhere("eagle3", config.hidden_size, place, layers)
    return HeadElsewhere("eagle", config.hidden_size, place)


def mtp_elsewhere(head: MtpHead) -> HeadElsewhere:
    return HeadElsewhere(head.kind, head.hidden_size, head.place)
