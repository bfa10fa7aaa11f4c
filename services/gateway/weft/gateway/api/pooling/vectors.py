"""Numbers of an answer: vectors, scores and probabilities."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
from weft.gateway.generation.generation import Generation
from weft.gateway.generation.stream import TokenStream

Float32Array = npt.NDArray[np.float32]


def vectors_of(generation: Generation) -> Float32Array:
    """[n, width]: the vectors of a prompt."""
    collected = generation.vectors
    return np.frombuffer(collected.values, "<f4").reshape(-1, collected.width)


def shown(vectors: Float32Array, encoding: str | None) -> object:
    """Vectors in the form for a JSON answer: lists of numbers, or base64."""
    if encoding == "base64":
        return base64.b64encode(vectors.astype("<f4", copy=False).tobytes()).decode()
    numbers: object = vectors.tolist()
    return numbers


def score_of(stream: TokenStream, generation: Generation) -> float:
    """The score of a pair, 0 to 1 unless the model's files ask for the bare value.

    A model that scores returns the logits of its two labels, yes and no, and the score is the
    probability of yes among the two. A classification head returns one value.
    """
    (values,) = vectors_of(generation).astype(np.float64)
    if len(values) == 2:
        return _sigmoid(float(values[0] - values[1]))
    value = float(values[0])
    return value if stream.card.pooling.has_bare_scores else _sigmoid(value)


def probabilities(values: Float32Array) -> list[float]:
    """Probabilities of one text's classes: softmax, or sigmoid if there is a single class."""
    wide = values.astype(np.float64)
    if len(wide) == 1:
        return [_sigmoid(float(wide[0]))]
    exponents = np.exp(wide - wide.max())
    found: list[float] = (exponents / exponents.sum()).tolist()
    return found


def _sigmoid(value: float) -> float:
    return (
        float(1.0 / (1.0 + np.exp(-value)))
        if value >= 0
        else float(np.exp(value) / (1.0 + np.exp(value)))
    )
