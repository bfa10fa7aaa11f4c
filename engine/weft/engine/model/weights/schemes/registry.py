"""The scheme of each number format."""

from __future__ import annotations

from collections.abc import Callable

from weft.checkpoint.quantization import Quantization
from weft.engine.model.weights.schemes.bitsandbytes import BitsAndBytesScheme
from weft.engine.model.weights.schemes.fp8 import Fp8Scheme
from weft.engine.model.weights.schemes.gguf import GgufScheme
from weft.engine.model.weights.schemes.int4 import IntScheme
from weft.engine.model.weights.schemes.int8 import Int8Scheme
from weft.engine.model.weights.schemes.mixed import MixedScheme
from weft.engine.model.weights.schemes.mxfp4 import Mxfp4Scheme
from weft.engine.model.weights.schemes.nvfp4 import Nvfp4Scheme
from weft.engine.model.weights.schemes.plain import PlainScheme
from weft.engine.model.weights.weights import Scheme

_SCHEMES: dict[str, Callable[[Quantization], Scheme]] = {
    "bitsandbytes": BitsAndBytesScheme,
    "int8": Int8Scheme,
    "int4": IntScheme,
    "fp8": Fp8Scheme,
    "gguf": GgufScheme,
    "mxfp4": Mxfp4Scheme,
    "nvfp4": Nvfp4Scheme,
}


def scheme_of(quantization: Quantization | None) -> Scheme:
    """The scheme that reads or makes a number format; None: weights in floats."""
    if quantization is None:
        return PlainScheme()
    if quantization.others:
        return MixedScheme(quantization, scheme_of)
    if quantization.packing is not None:
        return IntScheme(quantization)
    return _SCHEMES[quantization.format](quantization)
