"""How ranks divide a model: by the tensor-parallel plan that transformers publishes with it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from weft.contract.errors import ConfigError
from weft.engine.model.archs.by_transformers.products import Product, ProductPart, summed
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec, Shard
from weft.kernels.ops.peers.spec import Peers

_OUT, _IN, _PACKED_OUT, _PACKED_IN = "colwise", "rowwise", "packed_colwise", "packed_rowwise"
_AXES = {_OUT: (-2, 1), _IN: (-1, 1), _PACKED_OUT: (-2, 2), _PACKED_IN: (-1, 2)}
"""The divided axis of a weight, [..., out, in], and how many parts lie along it, each of which is
divided.
"""
_SUMMED = frozenset(("moe_tp_experts", "all_reduce"))
"""Styles of modules whose outputs are parts of a sum."""
_SHARED = "moe_identity_expert"
"""Style of a module that every rank computes although its output is a part of a sum."""
_WHOLE = frozenset(
    (
        *("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "local_params"),
        *("embedding_rowwise", "embedding_colwise", "colwise_gather_output", "colwise_rep"),
        *("rowwise_split_input", "rowwise_rep"),
    )
)
"""Styles of modules with whole inputs and outputs, which every rank computes as a whole."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class RankPlan:
    """What this rank has of each module of a model, and where ranks add up."""

    def __init__(self, causal: Any, architecture: str, peers: Peers) -> None:
        """Raises ConfigError if the model has no plan, or one that Weft cannot follow."""
        self.peers, self.shard = peers, Shard.among(peers)
        self._what = f"tp = {peers.size}: {architecture}"
        self._styles: dict[str, str] = dict(causal.tp_plan or {})
        for pattern, style in self._styles.items():
            if style not in (*_AXES, *_SUMMED, _SHARED, *_WHOLE):
                raise self._error(f"in its plan {pattern} has the style {style}, which is unknown")
        if not set(self._styles.values()) & _AXES.keys():
            raise self._error("transformers publishes no plan of its layers' products")

    def _error(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self._what} is computed by transformers' code: {why}; take tp = 1", param="tp"
        )

    def style(self, path: str) -> str | None:
        """The style of a module or parameter; None: the plan does not name it."""
        return self._styles.get(path) or self._styles.get(_NUMBER.sub("*", path))

    def spec(self, path: str, spec: LinearSpec) -> LinearSpec:
        """The product of linear modules, the first of which is at `path`, as ranks divide it."""
        style = self.style(path)
        if style is None or style in _WHOLE:
            return spec
        if style == _PACKED_OUT:
            (name,), (rows,) = spec.names, spec.rows
            names = f"{name}.0", f"{name}.1"
            half = rows // 2
            spec = replace(spec, names=names, rows=(half, half), fused=name, split="out")
        elif style in (_OUT, _IN):
            split: Literal["out", "in"] = "out" if style == _OUT else "in"
            spec = replace(spec, split=split)
        else:
            raise self._error(f"{path} is linear, and its style is {style}")
        counts = spec.rows if spec.split == "out" else (spec.in_features,)
        for count in counts:
            self._check(path, count)
        return spec

    def _check(self, path: str, count: int) -> None:
        if count % self.shard.size:
            raise self._error(f"{path} has {count}, which {self.shard.size} ranks cannot divide")

    def parts(
        self, path: str, name: str, shape: Sequence[int], module: torch.nn.Module
    ) -> tuple[list[TensorSlice], int]:
        """This rank's parts of a parameter that is no linear module's, and the axis along which
        they are joined.

        Args:
            path: The parameter's, with `name` as its last part.
            module: Its module.
        """
        style, size = self.style(path), tuple(shape)
        owner = self.style(path.rpartition(".")[0])
        if owner in _AXES:
            kind = type(module).__name__
            raise self._error(f"{path} of a {kind} is to be divided, which is no linear module")
        if style not in _AXES:
            return [TensorSlice(name, size)], 0
        axis, count = _AXES[style]
        if style == _OUT and len(size) == 1:
            axis = -1
        if len(size) < -axis or (style == _IN and owner not in _SUMMED):
            raise self._error(f"{path}, {list(size)}, has the style {style}")
        axis %= len(size)
        self._check(path, size[axis] // count)
        length = size[axis] // count
        own = self.shard.of(length, 1, may_repeat=False)
        before = (slice(None),) * axis
        return [
            TensorSlice(name, size, (*before, slice(at + own.start, at + own.stop)))
            for at in range(0, count * length, length)
        ], axis

    def place_sums(self, causal: torch.nn.Module) -> None:
        """Has modules add up over ranks what the plan says."""
        for path, module in causal.named_modules():
            style = self.style(path)
            if style in _SUMMED:
                module.register_forward_hook(self._sum)
            elif style == _SHARED:
                module.register_forward_pre_hook(self._share)

    def _sum(self, _: torch.nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
        return summed(output, self.peers)

    def _share(self, _: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (inputs[0] / self.shard.size, *inputs[1:])

    def divides(self, module: torch.nn.Module) -> bool:
        """Whether a module of attention computes this rank's heads alone."""
        products = (one for one in module.modules() if isinstance(one, Product | ProductPart))
        return any(one.split == "out" for one in products)
