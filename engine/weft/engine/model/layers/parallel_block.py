"""Attention and a recurrent layer that read the same rows, as in Falcon-H1."""

from __future__ import annotations

import torch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Query
from weft.engine.model.layers.recurrent import RecurrentMixer
from weft.engine.model.step import Step
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.stream.additions import Computed, Normed


class ParallelBlock:
    """Two mixers that read the same rows and whose results are added up: a `Mixer`."""

    def __init__(
        self, attention: Attention, recurrent: RecurrentMixer, factors: tuple[float, float]
    ) -> None:
        """`factors` multiply the results of attention and of the recurrent layer."""
        self.attention = attention
        self.recurrent = recurrent
        self.factors = factors

    @property
    def has_own_kv(self) -> bool:
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        self.attention.move(group, in_pool, plane)

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        return self.attention.prepare(step, rows, pool)

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        mixed = self.recurrent.write(x, step, pool)
        return self.attention.write(x, step, pool)._replace(beside=mixed.q)

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Computed:
        assert query.beside is not None, "written by this layer"
        sums = (
            self.attention.attend(query, step, pool),
            self.recurrent.attend(Query(query.beside), step, pool),
        )
        first, second = (
            factor * each.value() for factor, each in zip(self.factors, sums, strict=True)
        )
        return Computed(first + second, is_partial=True)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return ParallelBlock, self.attention.shape_key(), self.recurrent.shape_key()
