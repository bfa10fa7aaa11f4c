"""An adapter in host memory: scaled pairs of matrices by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank change of one projection: (x A^T) B^T is added to its output."""

    a: torch.Tensor
    """[r, in]; for an embedding [r, vocabulary], one column per token."""
    b: torch.Tensor
    """[out, r], already multiplied by the scaling."""

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """A low-rank change of one projection of all experts of a layer. A first axis of size 1 means
    that all experts share the matrix (shared outer).
    """

    a: torch.Tensor
    """[experts or 1, r, in]."""
    b: torch.Tensor
    """[experts or 1, out, r], already scaled; zeros for experts that the adapter does not
    change.
    """

    @property
    def rank(self) -> int:
        return self.a.shape[1]


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """An adapter's changes to the embedding or to the LM head. At least one of the fields is
    set.
    """

    weight: torch.Tensor | None = None
    """[vocabulary + added tokens, hidden]: replacement of the base weight."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose rows were trained individually."""
    rows: torch.Tensor | None = None
    """[len(token_ids), hidden]: replacements of these rows."""
    lora: LoraPair | None = None
    """Low-rank change, added to the result of the replacements."""
    tensor: str = ""
    """Name of the tensor of `rows`, or else of `weight`, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter in host memory that has been checked against its model."""

    digest: bytes
    """32 bytes over the content: the adapter's name inside the engine and between services."""
    rank: int
    """Largest rank of its modules; 0 if it changes only the vocabulary."""
    modules: Mapping[tuple[int, str], LoraPair]
    """By (layer, kind), kind one of `DENSE_KINDS` or `ROUTER`. Projections without an entry are
    unchanged.
    """
    experts: Mapping[tuple[int, str], ExpertLora] = field(default_factory=dict)
    """By (layer, kind), kind gate, up or down."""
    embed_tokens: VocabularyChange | None = None
    lm_head: VocabularyChange | None = None
    ignored: tuple[str, ...] = ()
    """Tensors that a lenient read did not apply."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory of all tensors. Shared memory counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for tensor in self._tensors()
        }
        return sum(storages.values())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for pair in self.modules.values():
            yield from (pair.a, pair.b)
        for stack in self.experts.values():
            yield from (stack.a, stack.b)
        for change in (self.embed_tokens, self.lm_head):
            if change is None:
                continue
            yield from (part for part in (change.weight, change.rows) if part is not None)
            if change.lora is not None:
                yield from (change.lora.a, change.lora.b)
