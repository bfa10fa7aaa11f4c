"""A learned low-rank augmentation of the residual stream (LAuReL, arXiv 2411.07501)."""

from __future__ import annotations

import torch
from weft.engine.model.layers.layer import shape_of
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.linear import LinearWeight, linear
from weft.kernels.norm import Norm


class Laurel:
    """x + norm(right(left(x))), where x are the rows that attention reads."""

    def __init__(self, left: LinearWeight, right: LinearWeight, norm: Norm) -> None:
        """Assembles the addition from its products.

        Args:
            left: [hidden] -> [R].
            right: [R] -> [hidden].
        """
        self._left, self._right, self._norm = left, right, norm

    @classmethod
    def read(cls, hidden: int, rank: int, eps: float, weights: Weights) -> Laurel:
        left = LinearSpec(names=("linear_left",), in_features=hidden, rows=(rank,))
        right = LinearSpec(names=("linear_right",), in_features=rank, rows=(hidden,))
        norm = Norm(weights.norm("post_laurel_norm", hidden), eps)
        return cls(weights.linear(left), weights.linear(right), norm)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        return x + self._norm(linear(linear(x, self._left), self._right))

    def shape_key(self) -> object:
        return Laurel, shape_of(self._left)
