"""What an adapter is once it is read: scaled pairs of matrices in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank change of one projection: x -> (x A^T) B^T, added to its output."""

    a: torch.Tensor
    """[r, in]; of an embedding [r, vocabulary]: a token takes its column."""
    b: torch.Tensor
    """[out, r], multiplied by the scaling already."""

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """A low-rank change of one projection of all experts of a layer.

    One entry in the place of one per expert means: the same for all (shared outer).
    """

    a: torch.Tensor
    """[experts or 1, r, in]."""
    b: torch.Tensor
    """[experts or 1, out, r], multiplied by the scaling already. Zeros: an expert that the adapter
    leaves alone."""

    @property
    def rank(self) -> int:
        """r."""
        return self.a.shape[1]


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """What an adapter does to the embedding or to the LM head: one or more of these."""

    weight: torch.Tensor | None = None
    """[vocabulary + added tokens, hidden]: takes the place of the base's."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose rows were trained one by one."""
    rows: torch.Tensor | None = None
    """[len(token_ids), hidden]: take the place of theirs."""
    lora: LoraPair | None = None
    """Added to what the above give."""
    tensor: str = ""
    """Name of the tensor of `rows`, or else of `weight`; for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that fits its model, in host memory."""

    digest: bytes
    """32 bytes: its name inside the engine and between services."""
    rank: int
    """The largest of its ranks; 0 where it has no LoRA at all, only vocabulary."""
    modules: Mapping[tuple[int, str], LoraPair]
    """By (layer, kind), kind one of `DENSE_KINDS` or `ROUTER`; a projection that is not there stays
    as it is."""
    experts: Mapping[tuple[int, str], ExpertLora] = field(default_factory=dict)
    """By (layer, kind), kind gate, up or down."""
    embed_tokens: VocabularyChange | None = None
    lm_head: VocabularyChange | None = None
    ignored: tuple[str, ...] = ()
    """Tensors that a lenient reading left out."""

    @property
    def num_bytes(self) -> int:
        """Host memory of all tensors; what two of them share counts once."""
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
