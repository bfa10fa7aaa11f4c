"""Numbers of an answer: vectors, scores and probabilities."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import Float32Array
from weft.contract.tasks import Output
from weft.gateway.generation.answer import Answer
from weft.gateway.generation.generation import Generation


def vectors_of(generation: Generation) -> Float32Array:
    """[n, width]: the vectors of a prompt."""
    collected = generation.vectors
    assert collected is not None, "they were asked for"
    return np.frombuffer(collected.values, "<f4").reshape(-1, collected.width)


class Shown(NamedTuple):
    """What a JSON answer holds of one prompt."""

    data: object
    """Numbers, lists of numbers, base64, or indices and values of a sparse vector."""
    shape: list[int]
    """Shape of the data: vectors and numbers in each, or numbers."""


def shown(answer: Answer, generation: Generation, output: Output, encoding: str | None) -> Shown:
    """The vectors of a prompt in the form for a JSON answer."""
    vectors = vectors_of(generation)
    if output == "sparse":
        weights = lexical_weights(generation.prompt.ids, vectors[:, 0], answer.card.unweighted_ids)
        data = {"indices": list(weights), "values": list(weights.values())}
        return Shown(data, [len(weights)])
    if output == "multi_vector":
        vectors = vectors[1:]  # As in BGE-M3, whose first token stands for the whole text.
    elif output != "token_embeddings":
        vectors = vectors[0]
    return Shown(written(vectors, encoding), list(vectors.shape))


def lexical_weights(
    ids: Sequence[int], weights: Float32Array, unweighted: Collection[int]
) -> dict[int, float]:
    """The largest weight of each token that a text has, as FlagEmbedding makes them for BGE-M3:
    those above 0, by token in the order of ids. `weights` is [len(ids)]; tokens of `unweighted`
    have none.
    """
    found: dict[int, float] = {}
    for id_, weight in zip(ids, weights.tolist(), strict=True):
        if weight > 0 and id_ not in unweighted:
            found[id_] = max(weight, found.get(id_, 0.0))
    return dict(sorted(found.items()))


def written(vectors: Float32Array, encoding: str | None) -> object:
    """Vectors as numbers, or as base64 of float32."""
    if encoding == "base64":
        return base64.b64encode(vectors.astype("<f4", copy=False).tobytes()).decode()
    numbers: object = vectors.tolist()
    return numbers


def score_of(answer: Answer, generation: Generation) -> float:
    """The score of a pair, 0 to 1 unless the model's files ask for the bare value.

    A model that scores returns the logits of its two labels, yes and no, and the score is the
    probability of yes among the two. A classification head returns one value.
    """
    (values,) = vectors_of(generation).astype(np.float64)
    if len(values) == 2:
        return _sigmoid(float(values[0] - values[1]))
    value = float(values[0])
    return value if answer.card.pooling.has_bare_scores else _sigmoid(value)


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
