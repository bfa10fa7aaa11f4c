"""Base of the schemes of quantised weights: modules in floats, fusing, experts, packing."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeAlias

import torch
from weft.checkpoint.kv_scheme import KV_SCALES
from weft.checkpoint.quantization import Quantization
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.plain import (
    PlainScheme,
    packed_experts,
    read_bias,
    read_experts,
)
from weft.engine.model.weights.specs import ExpertSpec, LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import pack_gate_up, pack_linear
from weft.kernels.ops.linear.spec import LinearWeight, PackableMatrix
from weft.kernels.ops.moe.spec import ExpertWeights
from weft.kernels.shared.formats.fp8 import FP8
from weft.kernels.shared.formats.int_groups import IntGroups
from weft.kernels.shared.formats.quantised import Fp8Channels, Int8Channels

Matrix: TypeAlias = PackableMatrix
"""A weight before packing: quantised, or floats of the model's dtype."""


class QuantisedScheme(ABC):
    """A `Scheme` for one number format, which a checkpoint has or which is made of floats at load.
    A subclass says how it reads one product's matrix (`matrix`) and quantises one (`made`).
    """

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization
        self.plain = PlainScheme()

    @property
    def is_made_at_load(self) -> bool:
        """Whether the checkpoint has floats, which the scheme quantises at load."""
        return self.quantization.source == "load"

    def fingerprint(self, dtype: torch.dtype, device: torch.device) -> bytes:
        return self.quantization.fingerprint()

    def linear(self, spec: LinearSpec, weights: Weights) -> LinearWeight:
        if self.quantization.has_kv_scales:
            _check_kv_scales(spec, weights)
        if self.ignores(spec, weights):
            return self.plain.linear(spec, weights)
        pack = pack_gate_up if spec.is_gated else pack_linear
        matrix = self._matrix(spec, weights)
        return pack(matrix, read_bias(spec, weights), weights.arena, weights.dtype)

    def experts(self, spec: ExpertSpec, weights: Weights) -> ExpertWeights:
        return packed_experts(self._experts(spec, weights), spec, weights)

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        return self.plain.head(matrix, weights)

    @abstractmethod
    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        """Reads the shard of a product that the checkpoint has in this format. Raises ModelError if
        a number or a scale is damaged; the message names it.
        """

    @abstractmethod
    def made(self, matrix: torch.Tensor) -> Matrix:
        """Quantises a matrix of floats, [N, K]. Raises ValueError if a number is not finite."""

    def ignores(self, spec: LinearSpec, weights: Weights) -> bool:
        """Whether a product stays in floats. Raises ModelError if only some projections do."""
        names = [name for name in spec.modules if self.ignores_name(name, weights)]
        if names and len(names) < len(spec.modules):
            raise ModelError(
                f"{listing(spec, weights)} are one product, of which "
                f"only {', '.join(names)} are in floats"
            )
        return bool(names)

    def ignores_name(self, name: str, weights: Weights) -> bool:
        """Whether a projection is in floats: by its tensors if they show it, else by the
        configuration.
        """
        if not self.is_made_at_load:
            packing = self.quantization.packing
            if packing and weights.shape_of(f"{name}.{packing.packed_name}") is not None:
                return False
            found = weights.dtype_of(f"{name}.weight")
            if found is not None:
                is_float = found.is_floating_point and found != FP8
                return is_float and not weights.has(f"{name}.{self.quantization.scale_name}")
        return self.quantization.ignores(weights.full_name(name))

    def made_linear(self, whole: torch.Tensor, spec: LinearSpec, weights: Weights) -> Matrix:
        """Quantises a product's matrix. Where the input is split, this rank keeps some of the
        columns, but the scales are those of all columns. Raises ModelError if a number is not
        finite, or a rank's share cuts a group of columns.
        """
        if spec.split != "in":
            return self.make(whole, weights)
        return self._made_of_columns(whole, spec, weights)

    def make(self, matrix: torch.Tensor, weights: Weights) -> Matrix:
        """`made`, but raises ModelError with the module's name."""
        with named_errors(weights):
            return self.made(matrix)

    def _matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        if self.is_made_at_load:
            read = replace(spec, split="none") if spec.split == "in" else spec
            return self.made_linear(weights.read(read.weights(weights.shard)), spec, weights)
        return self.matrix(spec, weights)

    def _made_of_columns(self, whole: torch.Tensor, spec: LinearSpec, weights: Weights) -> Matrix:
        own = spec.columns_of(weights.shard)
        made = self.make(whole, weights)
        if isinstance(made, Int8Channels | Fp8Channels):
            return replace(made, data=made.data[:, own].contiguous())
        if isinstance(made, IntGroups) and own.start % made.group:
            raise ModelError(f"{listing(spec, weights)}: a rank's share cuts a group of columns")
        return self.make(whole[:, own].contiguous(), weights)

    def _experts(self, spec: ExpertSpec, weights: Weights) -> Iterator[tuple[Matrix, Matrix]]:
        if self.is_made_at_load:
            whole = replace(spec, down=replace(spec.down, split="none"))
            for gate_up, down in read_experts(whole, weights):
                made = self._made_of_columns(down, spec.down, weights)
                yield self.make(gate_up, weights), made
            return
        if weights.has(spec.stacked[-1]):
            # The configuration's modules do not include one tensor of all experts: it is in floats.
            yield from read_experts(spec, weights)
            return
        for number in spec.numbers:
            expert = weights.at(number)
            first, second = (
                expert.read(part.weights(expert.shard))
                if self.ignores(part, expert)
                else self.matrix(part, expert)
                for part in (spec.gate_up, spec.down)
            )
            yield first, second


@contextmanager
def named_errors(weights: Weights) -> Iterator[None]:
    """Turns a ValueError into a ModelError with the module's name."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"{weights.full_name('')}: {error}") from error


def listing(spec: LinearSpec, weights: Weights) -> str:
    """The full names of a product's projections, for messages."""
    return ", ".join(weights.full_name(name) for name in spec.modules)


def one_scale(name: str, weights: Weights) -> torch.Tensor:
    """[1] float32: a tensor of one number, of whatever shape. Raises ModelError if the tensor is
    missing, has another size, or is no scale.
    """
    shape = weights.shape_of(name)
    shape = (1,) if shape is None else shape
    if math.prod(shape) != 1:
        raise ModelError(f"{weights.full_name(name)} has shape {shape}, not one number")
    scale = weights.tensor(TensorSlice(name, shape), torch.float32).view(1)
    if not 0 <= scale.item() < math.inf:
        raise ModelError(f"{weights.full_name(name)}: {scale.item()} is no scale")
    return scale


def _check_kv_scales(spec: LinearSpec, weights: Weights) -> None:
    """Reads, and so uses up, the fixed scales of K and V that belong to a product's projections."""
    for module in spec.modules:
        layer, _, projection = module.rpartition("_proj")[0].rpartition(".")
        scale = f"{projection}_scale"
        if scale in KV_SCALES:
            prefix = f"{layer}." if layer else ""
            for name in (prefix + scale, f"{module}.{scale}"):
                if weights.has(name):
                    one_scale(name, weights)


def check_scales(scales: torch.Tensor, spec: LinearSpec, weights: Weights, name: str) -> None:
    """Raises ModelError if a scale is negative or not finite. `name` is the scale's name in the
    message.
    """
    if not bool((torch.isfinite(scales) & (scales >= 0)).all()):
        raise ModelError(f"{listing(spec, weights)}: a {name} is negative or not finite")
