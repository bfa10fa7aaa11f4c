"""An adapter in host memory: scaled pairs of matrices by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class LoraPair:
    """A low-rank change of one projection: x -> (x A^T) B^T, added to its output."""

    a: torch.Tensor
    """The matrix A, [r, in]; for an embedding [r, vocabulary], with one column per token."""
    b: torch.Tensor
    """The matrix B [out, r], already multiplied by the scaling."""

    @property
    def rank(self) -> int:
        """Rank r of the pair."""
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """A low-rank change of one projection of all experts of a layer.

    A first axis of size 1 means that all experts share the matrix (shared outer).
    """

    a: torch.Tensor
    """The A matrices, [experts or 1, r, in]."""
    b: torch.Tensor
    """The matrices B, [experts or 1, out, r], already scaled; zeros for experts that the adapter
    does not change.
    """

    @property
    def rank(self) -> int:
        """Rank r of the pairs."""
        return self.a.shape[1]


@dataclass(frozen=True, slots=True)
class VocabularyChange:
    """An adapter's changes to the embedding or to the LM head: one or more of the fields is set."""

    weight: torch.Tensor | None = None
    """Replacement of the base weight, [vocabulary + added tokens, hidden]."""
    token_ids: tuple[int, ...] = ()
    """Tokens whose rows were trained individually."""
    rows: torch.Tensor | None = None
    """Replacements of these rows, [len(token_ids), hidden]."""
    lora: LoraPair | None = None
    """Low-rank change, added to the result of the replacements."""
    tensor: str = ""
    """Name of the tensor of `rows`, or else of `weight`, for messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A LoRA adapter that fits its model, in host memory."""

    digest: bytes
    """Content digest, 32 bytes: its name inside the engine and between services."""
    rank: int
    """Largest rank of its modules; 0 if it changes only the vocabulary."""
    modules: Mapping[tuple[int, str], LoraPair]
    """Pairs by (layer, kind), kind one of `DENSE_KINDS` or `ROUTER`; absent projections are
    unchanged.
    """
    experts: Mapping[tuple[int, str], ExpertLora] = field(default_factory=dict)
    """Pairs of experts by (layer, kind), kind gate, up or down."""
    embed_tokens: VocabularyChange | None = None
    lm_head: VocabularyChange | None = None
    ignored: tuple[str, ...] = ()
    """Tensors that a lenient read left out."""

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory of all tensors; shared memory counts once."""
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
