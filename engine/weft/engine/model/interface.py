"""The interface that every model offers to the executor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.layout import CacheLayout
from weft.engine.model.pooled_heads import DenseLayers
from weft.engine.model.step import Step
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.lora.spec import LoraStep


class Model(Protocol):
    """A decoder-only language model over a paged KV pool, or an encoder, which uses no pool."""

    config: ModelConfig

    def kv_layout(self, page_size: int) -> CacheLayout: ...

    def forward(self, step: Step, pool: torch.Tensor) -> torch.Tensor:
        """Runs one step.

        Args:
            pool: `kv_layout(page_size).pool_shape(num_pages)`, contiguous, of the model's dtype.
                The step writes K and V of the new tokens and reads those before them.

        Returns:
            [L, hidden]: hidden states of `step.logits_rows` after the final norm. If no row is
                wanted, the last layer ends with its KV write and L is 0.
        """

    def logits(self, hidden: torch.Tensor, lora: LoraStep | None = None) -> torch.Tensor:
        """[L, hidden] from `forward` -> [L, config.num_embeddings] float32. Only models with an LM
        head implement it.

        `lora` are the adapters of these rows: `step.lora.select(step.logits_rows)`.
        """


@runtime_checkable
class WithClasses(Protocol):
    """A model that may have a classification head."""

    @property
    def classes(self) -> DenseLayers | None:
        """None: the model has no classification head."""


@runtime_checkable
class MayCapture(Protocol):
    """A model whose passes can become CUDA graphs or not, which its code decides."""

    @property
    def can_capture(self) -> bool: ...


def can_capture(model: Model) -> bool:
    return not isinstance(model, MayCapture) or model.can_capture


@runtime_checkable
class MayWaitForLayers(Protocol):
    """A model whose steps may begin before the pool has all layers (`Step.late`), or not."""

    @property
    def waits_for_layers(self) -> bool: ...


def waits_for_layers(model: Model) -> bool:
    return isinstance(model, MayWaitForLayers) and model.waits_for_layers


@runtime_checkable
class LogitsInParts(Protocol):
    """A model of whose logits each rank can compute a part."""

    def logits_part(self, hidden: torch.Tensor, tokens: slice) -> torch.Tensor | None:
        """Logits of some tokens: [L, hidden] -> [L, tokens] float32. None: the head has no parts,
        which its number format alone decides.
        """


class ModelClass(Protocol):
    """A model's class as the loader sees it: the constructor reads the parameters."""

    def __call__(self, config: ModelConfig, weights: Weights) -> Model:
        """Reads every parameter of the model from `weights`."""


class MediaEncoder(Protocol):
    """The part of a model that makes rows of media."""

    digest: bytes
    """32 bytes that name the encoder and its weights."""

    @property
    def row_width(self) -> int:
        """Elements of a row: those of the stream, and as many for each of the model's first layers
        after which further rows are added to it.
        """
        ...

    @property
    def sees_both_ways(self) -> bool:
        """Whether tokens of one medium attend to one another both ways in the language model."""
        ...

    def max_shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of a medium that takes as much memory to encode as any that has at most so many
        rows.
        """
        ...

    def rows_of(self, shape: Sequence[int]) -> int:
        """Rows of a medium of this shape. Raises InvalidRequest for one that it cannot take."""
        ...

    def cost_of(self, shape: Sequence[int]) -> int:
        """Patches of a medium of this shape."""
        ...

    def encode(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """[height, width, 3] uint8 each, on the model's device -> [rows of all, row_width]."""
        ...


class PlacedMedia(NamedTuple):
    """Media in the memory of an encoder's passes of fixed sizes."""

    size: int
    """The pass that encodes them."""
    num_rows: int
    """Rows of the media; those behind them are padding."""
    order: torch.Tensor | None
    """[num_rows] int64: the place in the pass of each row in the order of media; None: that
    order.
    """


class EncoderBudgets(Protocol):
    """Passes of an encoder over memory at fixed addresses, each for media of at most so many
    patches in total.
    """

    sizes: Sequence[int]
    """Patches of each pass, ascending."""

    def put(self, pictures: Sequence[torch.Tensor]) -> PlacedMedia | None:
        """Copies media, as `MediaEncoder.encode` takes them, to the memory of the passes. None: no
        pass has room for them.
        """
        ...

    def run(self, size: int) -> torch.Tensor:
        """Encodes what was put last. Returns [rows of `size` patches, row_width]. It takes the same
        path and addresses for all media, and can be captured.
        """
        ...


@runtime_checkable
class HasBudgets(Protocol):
    """An encoder whose passes can have fixed sizes."""

    def budgets(self, max_cost: int) -> EncoderBudgets:
        """Passes for up to `max_cost` patches, with their memory."""
        ...
