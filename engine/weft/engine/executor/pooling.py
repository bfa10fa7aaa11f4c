"""Pools the hidden states of prompts into vectors, step by step as the prompts are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from weft.contract.arrays import Float32Array
from weft.contract.tasks import TOKEN_OUTPUTS, Output
from weft.engine.base.device_copies import DeviceCopies, Fetched
from weft.engine.executor.step_input import PooledRows
from weft.engine.model.pooled_heads import DenseLayers, PooledHeads

ROWS_AT_ONCE = 64
"""Rows whose logits exist at a time."""


class Pooler:
    """Sums the hidden states of unfinished prompts by slot, and turns finished prompts into
    vectors. With `is_fixed`, vectors are computed one by one, so that no vector depends on another.
    """

    def __init__(
        self,
        heads: PooledHeads,
        max_requests: int,
        hidden_size: int,
        device: torch.device,
        *,
        is_fixed: bool = False,
    ) -> None:
        self._heads = heads
        self._is_fixed = is_fixed
        self._shape = (max_requests, hidden_size)
        self._device = device
        self._copies = DeviceCopies(device)
        self._sums: torch.Tensor | None = None

    def begin(
        self,
        pieces: Sequence[PooledRows],
        hidden: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    ) -> PooledStates:
        """Takes in the wanted rows of a step.

        Args:
            pieces: At least one piece of a prompt.
            hidden: [S, hidden]: the pieces' wanted rows after the final norm, piece after piece.
            logits_of: Computes logits, [n, vocab] float32, of n of these rows. The second argument
                has the number of each row's piece.
        """
        output = pieces[0].pool.output
        if (pooled := self._of_whole_prompts(pieces, hidden)) is not None:
            made = self._made(output, pieces, range(len(pieces)), pooled, hidden.dtype, logits_of)
            return PooledStates.of_rows(pieces, made)
        found: list[tuple[PooledRows, torch.Tensor]] = []
        whole: dict[Output, list[int]] = {}
        vectors: list[torch.Tensor | None] = [None] * len(pieces)
        rows = torch.split(hidden, [len(piece.wanted) for piece in pieces])
        for number, (piece, own) in enumerate(zip(pieces, rows, strict=True)):
            if piece.pool.output in TOKEN_OUTPUTS:
                head = self._heads.tokens.get(piece.pool.output, self._heads.embedding)
                found.append((piece, self._apply(head, own.float())))
                continue
            vectors[number] = self._pooled(piece, own)
            if piece.is_last:
                whole.setdefault(piece.pool.output, []).append(number)
        for output, numbers in whole.items():
            pooled = torch.stack([_given(vectors[number]) for number in numbers])
            made = self._made(output, pieces, numbers, pooled, hidden.dtype, logits_of)
            found += [(pieces[number], row) for number, row in zip(numbers, made, strict=True)]
        return PooledStates(found)

    def _of_whole_prompts(
        self, pieces: Sequence[PooledRows], hidden: torch.Tensor
    ) -> torch.Tensor | None:
        """[P, hidden] float32 of P pieces in a few operations, if each piece is a whole prompt that
        wants one vector; else None.
        """
        pool = pieces[0].pool
        for piece in pieces:
            own, is_like = piece.pool, piece.is_last
            is_like &= own.output == pool.output and own.output not in TOKEN_OUTPUTS
            is_like &= own.pooling == "last" or piece.is_whole
            if not is_like or own.pooling != pool.pooling:
                return None
        if pool.pooling != "mean":
            return hidden.float()
        if self._is_fixed:
            return None
        lengths = np.array([piece.num_tokens for piece in pieces])
        (sent,) = self._copies.send((lengths,))
        return torch.segment_reduce(hidden.float(), "mean", lengths=sent, axis=0, unsafe=True)

    def _made(
        self,
        output: Output,
        pieces: Sequence[PooledRows],
        numbers: Sequence[int],
        pooled: torch.Tensor,
        dtype: torch.dtype,
        logits_of: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    ) -> Sequence[torch.Tensor] | torch.Tensor:
        if output == "embedding":
            return self._apply(self._heads.embedding, pooled)
        if output == "classes":
            assert self._heads.classes is not None, "the model has no classification head"
            return self._apply(self._heads.classes, pooled)
        return self._label_logits(pieces, numbers, pooled.to(dtype), logits_of)

    def _apply(self, layers: DenseLayers, rows: torch.Tensor) -> torch.Tensor:
        if not self._is_fixed:
            return layers(rows)
        return torch.cat([layers(row) for row in torch.split(rows, 1)])

    def _pooled(self, piece: PooledRows, rows: torch.Tensor) -> torch.Tensor | None:
        """[hidden] float32 of a prompt that ends with these rows; None: later steps bring more
        rows.
        """
        pooling = piece.pool.pooling
        if pooling == "last":
            return rows[-1].float() if piece.is_last else None
        own = rows[0].float() if pooling == "first" else rows.float().sum(0)
        if piece.start == 0 and piece.is_last:
            total = own
        else:
            if self._sums is None:
                self._sums = torch.zeros(self._shape, device=self._device)
            total = self._sums[piece.slot]
            if piece.start == 0:
                total.copy_(own)
            elif pooling == "mean":
                total += own
        if not piece.is_last:
            return None
        return total.clone() if pooling == "first" else total / piece.prompt_length

    def _label_logits(
        self,
        pieces: Sequence[PooledRows],
        numbers: Sequence[int],
        pooled: torch.Tensor,
        logits_of: Callable[[torch.Tensor, Sequence[int]], torch.Tensor],
    ) -> list[torch.Tensor]:
        made = []
        for first in range(0, len(numbers), ROWS_AT_ONCE):
            some = numbers[first : first + ROWS_AT_ONCE]
            logits = logits_of(pooled[first : first + ROWS_AT_ONCE], some)
            for row, number in zip(logits, some, strict=True):
                made.append(row[list(pieces[number].pool.label_ids)])
        return made


def _given(vector: torch.Tensor | None) -> torch.Tensor:
    assert vector is not None
    return vector


class PooledStates:
    """Vectors of a step, which the device may still be computing.

    Args:
        found: Pieces that have vectors, with their vectors: [width], or [rows, width] for one per
            token.
        flat: All vectors in one tensor, piece after piece; None: they are joined here.
    """

    def __init__(
        self, found: Sequence[tuple[PooledRows, torch.Tensor]], flat: torch.Tensor | None = None
    ) -> None:
        self._pieces = [piece for piece, _ in found]
        self._shapes = [vectors.shape for _, vectors in found]
        if found and flat is None:
            flat = torch.cat([vectors.reshape(-1) for _, vectors in found])
        self._fetched = None if flat is None else Fetched(flat)

    @classmethod
    def of_rows(
        cls, pieces: Sequence[PooledRows], rows: Sequence[torch.Tensor] | torch.Tensor
    ) -> PooledStates:
        flat = rows.reshape(-1) if isinstance(rows, torch.Tensor) else None
        return cls(list(zip(pieces, rows, strict=True)), flat)

    def wait(self) -> list[tuple[PooledRows, Float32Array]]:
        """Waits for the vectors: [n, width] of each piece, normalised and cut to the wanted
        dimensions.
        """
        if self._fetched is None:
            return []
        values = self._fetched.wait().numpy()
        sizes = [shape.numel() for shape in self._shapes]
        parts = np.split(values, np.cumsum(sizes)[:-1])
        return [
            (piece, _finished(piece, part.reshape(-1, shape[-1])))
            for piece, part, shape in zip(self._pieces, parts, self._shapes, strict=True)
        ]


def _finished(piece: PooledRows, vectors: Float32Array) -> Float32Array:
    pool = piece.pool
    if pool.dimensions is not None:
        vectors = vectors[:, : pool.dimensions]
    if pool.normalises:
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors = vectors / np.maximum(lengths, 1e-12)
    return np.ascontiguousarray(vectors, np.float32)
