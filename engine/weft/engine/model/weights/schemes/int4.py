"""Products in integers with a scale per group, packed by checkpoints or made at load in 4 bits."""

from __future__ import annotations

import logging

import torch
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.schemes.base import Matrix, QuantisedScheme, listing
from weft.engine.model.weights.schemes.int_layouts import IntParts, join_parts, read_parts
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.pack import pack_linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.shared.formats.int_groups import IntGroups, quantise_groups
from weft.kernels.shared.formats.quantised import quantise_channels

logger = logging.getLogger(__name__)


class IntScheme(QuantisedScheme):
    """A `Scheme` of integers of 4 or 8 bits with a scale for each group along a row.

    `int_layouts` describes their layout in checkpoints. At load, floats are rounded to 4 bits in
    groups of 32, and the LM head to 8 bits.
    """

    def head(self, matrix: torch.Tensor, weights: Weights) -> LinearWeight:
        if not self.is_made_at_load:
            return super().head(matrix, weights)
        try:
            return pack_linear(quantise_channels(matrix), None, weights.arena, weights.dtype)
        except ValueError as error:
            raise ModelError(f"{weights.full_name('lm_head')}: {error}") from error

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        packing = self.quantization.packing
        assert packing is not None
        parts, wholes = [], dict[str, IntParts]()
        for share in spec.weights(weights.shard):
            name = share.name.removesuffix(".weight")
            if name not in wholes:
                shape = (share.shape[0], share.shape[1])
                wholes[name] = read_parts(name, shape, packing, weights)
                if not spec.bias:
                    _check_no_bias(f"{name}.bias", share.shape[0], weights)
            parts.append(self._cut(wholes[name], share, packing.group, spec, weights))
        try:
            joined = join_parts(parts, packing, weights.dtype)
        except ValueError as error:
            raise ModelError(f"{listing(spec, weights)}: {error}") from error
        if isinstance(joined, torch.Tensor):
            reason = "groups of columns have no common order, or are no multiple of 32"
            logger.warning(
                "%s: computed in %s: %s", listing(spec, weights), weights.dtype_name, reason
            )
        return joined

    def made(self, matrix: torch.Tensor) -> IntGroups:
        return quantise_groups(matrix)

    def _cut(
        self, whole: IntParts, share: TensorSlice, group: int, spec: LinearSpec, weights: Weights
    ) -> IntParts:
        rows, columns = share.slices
        assert isinstance(rows, slice)
        assert isinstance(columns, slice)
        try:
            return whole.cut(rows, columns, group or share.shape[1])
        except ValueError as error:
            raise ModelError(f"{listing(spec, weights)}: {error}") from error


def _check_no_bias(name: str, rows: int, weights: Weights) -> None:
    """Raises ModelError if a bias that the model does not have is not zero. GPTQ's tools write
    zeros where a projection has no bias.
    """
    if weights.shape_of(name) is None:
        return
    if bool(weights.tensor(TensorSlice(name, (rows,)), torch.float32).any()):
        raise ModelError(f"{weights.full_name(name)} is not zero, but the model has no such bias")
