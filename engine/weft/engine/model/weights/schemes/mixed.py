"""Products in several number formats, by the names of their modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from weft.checkpoint.quantization import Quantization
from weft.engine.model.weights.schemes.base import Matrix, QuantisedScheme, listing
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Scheme, Weights

logger = logging.getLogger(__name__)


class MixedScheme(QuantisedScheme):
    """A `Scheme` that reads each product as the scheme of its modules does. Projections of one
    product that have several formats become floats.
    """

    def __init__(
        self, quantization: Quantization, scheme_of: Callable[[Quantization], Scheme]
    ) -> None:
        super().__init__(quantization)
        own = replace(quantization, others=())
        self._schemes: dict[Quantization, QuantisedScheme] = {}
        for format_of in (own, *(other for _, other in quantization.others)):
            scheme = scheme_of(format_of)
            assert isinstance(scheme, QuantisedScheme), "checkpoints mix formats of this kind"
            self._schemes[format_of] = scheme

    def matrix(self, spec: LinearSpec, weights: Weights) -> Matrix:
        schemes = [self._scheme(name, weights) for name in spec.modules]
        if all(scheme is schemes[0] for scheme in schemes):
            return schemes[0].matrix(spec, weights)
        logger.warning(
            "%s: computed in %s: their formats differ", listing(spec, weights), weights.dtype_name
        )
        return torch.cat([weights.matrix(replace(part, is_gated=False)) for part in spec.parts])

    def made(self, matrix: torch.Tensor) -> Matrix:
        raise AssertionError("checkpoints mix formats, none is made of floats")

    def ignores_name(self, name: str, weights: Weights) -> bool:
        return self._scheme(name, weights).ignores_name(name, weights)

    def _scheme(self, name: str, weights: Weights) -> QuantisedScheme:
        found = self.quantization.of(weights.full_name(name))
        return self._schemes[replace(found, others=())]
