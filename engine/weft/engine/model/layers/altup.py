"""Alternating updates (AltUp, arXiv 2301.13310): a residual stream of several copies, of which each
layer computes the first and predicts all later ones. The forms are Gemma 3n's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.checkpoint.parts import AltUpConfig
from weft.engine.model.layers.layer import Layer, Mixer, Query, shape_of
from weft.engine.model.layers.per_layer import PerLayerPart
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import AnyNorm, Norm
from weft.kernels.ops.stream import stream_of
from weft.kernels.ops.stream.additions import Normed
from weft.kernels.ops.stream.reference import Stream

_LEAST_SQUARE = 1e-5
"""Least mean square of a copy before it is scaled."""


class Copies:
    """Makes C copies of a stream of hidden states, and merges them again."""

    def __init__(self, spread: LinearWeight, merge: tuple[LinearWeight, ...]) -> None:
        """`spread` is [H] -> [(C - 1) * H]; `merge` is [H] -> [H] for each copy but the first."""
        self._spread, self._merge = spread, merge

    @classmethod
    def read(cls, hidden: int, copies: int, weights: Weights) -> Copies:
        """`weights` are below the prefix of the layers' module."""

        def product(*names: str) -> LinearWeight:
            rows = (hidden,) * len(names)
            return weights.linear(LinearSpec(names=names, in_features=hidden, rows=rows))

        others = range(copies - 1)
        spread = product(*(f"altup_projections.{number}" for number in others))
        merge = tuple(product(f"altup_unembed_projections.{number}") for number in others)
        return cls(spread, merge)

    def spread(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, C * H]: the copies, of equal magnitudes."""
        rows, width = hidden.shape
        others = linear(hidden, self._spread).view(rows, len(self._merge), width)
        scaled = _like(others, hidden.unsqueeze(1))
        return torch.cat((hidden.unsqueeze(1), scaled), dim=1).flatten(1)

    def merged(self, stream: torch.Tensor) -> torch.Tensor:
        """[T, C * H] -> [T, H]: the mean of the copies."""
        first, *others = stream.chunk(len(self._merge) + 1, dim=1)
        made = [linear(other.contiguous(), w) for other, w in zip(others, self._merge, strict=True)]
        scaled = _like(torch.stack(made, dim=1), first.unsqueeze(1))
        return torch.cat((first.unsqueeze(1), scaled), dim=1).mean(dim=1)


def _like(copies: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Copies, [T, C - 1, H], scaled to the root mean square of the first one, [T, 1, H]."""
    target = first.float().square().mean(dim=-1, keepdim=True)
    found = copies.float().square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE)
    return (copies * (target / found).sqrt()).to(copies.dtype)


class AltUp(NamedTuple):
    """A layer's prediction of the copies before its blocks, and their correction after."""

    norm: Norm
    """Normalises rows before the router. Its weight includes the router's factor 1 / H."""
    router: LinearWeight
    """[H] -> [C]."""
    prediction: torch.Tensor
    """[C * C, C] float32: from router outputs to the coefficient of each copy in each prediction.
    """
    correction: torch.Tensor
    """[C, C] float32: from router outputs to the coefficient of each correction."""
    scale: torch.Tensor
    """[H]: factor on the first copy where the layer's part of the second embedding reads it."""

    @classmethod
    def read(cls, hidden: int, copies: int, eps: float, weights: Weights) -> AltUp:
        """`weights` are below the parameters' prefix. Quantised checkpoints keep them in floats."""

        def matrix(name: str, rows: int) -> torch.Tensor:
            part = TensorSlice(f"{name}.weight", (rows, copies))
            return weights.read([part], dtype=torch.float32)

        router = weights.read([TensorSlice("modality_router.weight", (copies, hidden))])
        gains = weights.read([TensorSlice("router_norm.weight", (hidden,))], dtype=torch.float32)
        return cls(
            Norm(gains / hidden, eps),
            pack_linear(router, None, weights.arena, weights.dtype),
            matrix("prediction_coefs", copies * copies),
            matrix("correction_coefs", copies),
            weights.read([TensorSlice("correct_output_scale", (hidden,))]),
        )

    def predicted(self, copies: torch.Tensor) -> torch.Tensor:
        """[T, C, H] -> [T, C, H]: each copy plus a combination of all."""
        count = copies.shape[1]
        coefficients = _of_each(self._routed(copies[:, 0].contiguous()), self.prediction)
        coefficients = coefficients.view(-1, count, count).to(copies.dtype)
        return torch.baddbmm(copies, coefficients, copies)

    def corrected(self, predicted: torch.Tensor, computed: torch.Tensor) -> torch.Tensor:
        """The predictions, [T, C, H], each moved by a multiple of the difference between the
        layer's result, [T, H], and the first prediction.
        """
        change = computed - predicted[:, 0]
        coefficients = _of_each(self._routed(computed), self.correction) + 1.0
        coefficients = coefficients.to(change.dtype).unsqueeze(2)
        return torch.addcmul(predicted, coefficients, change.unsqueeze(1))

    def _routed(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.tanh(linear(self.norm(rows), self.router, out_dtype=torch.float32))


def _of_each(routed: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """[T, C] and [N, C] -> [T, N]: their product, computed for each row by itself."""
    return (routed.unsqueeze(1) * matrix).sum(dim=2)


class Laurel:
    """A learned low-rank augmentation of the stream (LAuReL, arXiv 2411.07501):
    x + norm(right(left(x))), where x are the rows that attention reads.
    """

    def __init__(self, left: LinearWeight, right: LinearWeight, norm: Norm) -> None:
        """`left` is [hidden] -> [R], `right` is [R] -> [hidden]."""
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


class AltUpLayer:
    """A layer that computes the first copy of the stream: a `StackLayer`.

    Args:
        layer: Its mixer and feed-forward block. The stream that they add to starts with LAuReL's
            addition times 1 / sqrt(2), so the norm after the mixer includes this factor too.
        part: The layer's part of a second embedding, which is added to the other copies.
        part_post: Norm of the result of `part`.
    """

    def __init__(
        self, layer: Layer, part: PerLayerPart, part_post: AnyNorm, altup: AltUp, laurel: Laurel
    ) -> None:
        self._layer, self._part, self._part_post = layer, part, part_post
        self._altup, self._laurel = altup, laurel

    @classmethod
    def read(
        cls, layer: Layer, config: AltUpConfig, hidden: int, eps: float, weights: Weights
    ) -> AltUpLayer:
        """Reads the parameters that a usual layer with norms around its blocks lacks."""
        form = layer.form
        post, part, part_post = form.mixer_post, form.last, form.last_post
        assert isinstance(post, Norm), "families with AltUp have norms around blocks"
        assert isinstance(part, PerLayerPart), "families with AltUp have a second embedding"
        assert part_post is not None
        post = Norm(post.weight.float() * 0.5**0.5, post.eps)
        form = form._replace(mixer_post=post, last=None, last_post=None)
        altup = AltUp.read(hidden, config.copies, eps, weights.at("altup"))
        laurel = Laurel.read(hidden, config.laurel_rank, eps, weights.at("laurel"))
        return cls(layer._replace(form=form), part, part_post, altup, laurel)

    @property
    def number(self) -> int:
        return self._layer.number

    @property
    def mixer(self) -> Mixer:
        return self._layer.mixer

    def begin(self, stream: Stream) -> Normed:
        predicted = self._altup.predicted(self._copies(stream.normed(None).value))
        stream.replace(predicted.flatten(1))
        return Normed(self._normed(predicted))

    def finish(self, stream: Stream, query: Query, step: Step, pool: torch.Tensor) -> None:
        predicted = self._copies(stream.settle())
        begun = (predicted[:, 0] + self._laurel(self._normed(predicted))) * 0.5**0.5
        first = stream_of(begun, None, stream.peers)
        self._layer.finish(first, query, step, pool)
        copies = self._altup.corrected(predicted, first.settle())
        scaled = Normed(copies[:, 0] * self._altup.scale)
        added = self._part_post(first.computed(self._part(scaled, step)))
        copies[:, 1:] += added.unsqueeze(1)
        stream.replace(copies.flatten(1))

    def _copies(self, stream: torch.Tensor) -> torch.Tensor:
        return stream.view(stream.shape[0], self._altup.router.out_features, -1)

    def _normed(self, predicted: torch.Tensor) -> torch.Tensor:
        assert self._layer.input_norm is not None, "families with AltUp have norms around blocks"
        return self._layer.input_norm(predicted[:, 0].contiguous())

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        part, laurel = self._part.shape_key(), self._laurel.shape_key()
        return AltUpLayer, self._layer.shape_key(), part, laurel
