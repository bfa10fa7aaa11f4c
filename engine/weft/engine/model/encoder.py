"""Base of bidirectional encoders, which take whole prompts and keep no KV."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.layout import CacheLayout, PagedPlane
from weft.engine.model.layers.encoder import Ragged
from weft.engine.model.pooled_heads import DenseLayers
from weft.engine.model.step import Step
from weft.engine.model.weights.computed_format import dtype_name
from weft.kernels.ops.encoder_attention.spec import Bounds
from weft.kernels.ops.lora.spec import LoraStep


class Encoder(ABC):
    """A `Model` whose tokens also attend to later tokens. Steps have whole prompts, so pages only
    count tokens and hold no data.
    """

    classes: DenseLayers | None
    """None: the model has no classification head."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config = config
        self.dtype = dtype

    def kv_layout(self, page_size: int) -> CacheLayout:
        """A page has one number per token, which nothing reads."""
        dtype = dtype_name(self.dtype)
        plane = PagedPlane(layers=1, heads=1, dim=1, dtype=dtype)
        return CacheLayout.of_plane(plane, page_size)

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        bounds = Bounds.of(step.groups[0].cu_q_lens)
        hidden = self.encode(step, Ragged(bounds, step))
        return hidden if step.wants_all else hidden.index_select(0, step.logits_rows)

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        raise AssertionError("an encoder has no LM head")

    @abstractmethod
    def encode(self, step: Step, batch: Ragged) -> torch.Tensor:
        """[T, hidden]: final hidden states of all rows."""
