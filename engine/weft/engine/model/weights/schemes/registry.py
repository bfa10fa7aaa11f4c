"""The scheme of each number format."""

from __future__ import annotations

from weft.engine.checkpoint.quantization import Quantization
from weft.engine.model.weights.schemes.fp8 import Fp8Scheme
from weft.engine.model.weights.schemes.int8 import Int8Scheme
from weft.engine.model.weights.schemes.mxfp4 import Mxfp4Scheme
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Scheme


def scheme_of(quantization: Quantization | None) -> Scheme:
    """The scheme that reads or makes a format; None: weights in floats."""
    if quantization is None:
        return PlainScheme()
    if quantization.format == "fp8":
        return Fp8Scheme(quantization)
    if quantization.format == "mxfp4":
        return Mxfp4Scheme(quantization)
    return Int8Scheme(quantization)
