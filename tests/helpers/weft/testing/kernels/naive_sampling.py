"""Sampling written as plainly as possible: full sorts, float64, Python integers, no shared code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]

WORD = 0xFFFFFFFF


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Philox4x32-10, after the figures of Salmon et al. 2011."""
    left0, right0, left1, right1 = counter
    key0, key1 = key
    for _ in range(10):
        product0, product1 = left0 * 0xD2511F53, left1 * 0xCD9E8D57
        left0, right0, left1, right1 = (
            (product1 >> 32) ^ right0 ^ key0,
            product1 & WORD,
            (product0 >> 32) ^ right1 ^ key1,
            product0 & WORD,
        )
        key0, key1 = (key0 + 0x9E3779B9) & WORD, (key1 + 0xBB67AE85) & WORD
    return [left0, right0, left1, right1]


@lru_cache(maxsize=100_000)
def gumbel(seed: int, position: int, token_id: int) -> float:
    """Noise of one token, by the C library's logarithm."""
    counter = (token_id // 2, position & WORD, position >> 32, 0)
    words = philox(counter, (seed & WORD, seed >> 32))
    high, low = words[2:] if token_id % 2 else words[:2]
    uniform = ((high * 2**32 + low) // 2**12 + 0.5) / 2**52
    return -math.log(-math.log(uniform))


@dataclass
class NaiveParams:
    """SamplingParams and StopCriteria, with the sample's tokens so far."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    masked: tuple[int, ...] = ()
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()


def edited_logits(raw: npt.NDArray[np.float32], params: NaiveParams) -> npt.NDArray[np.float32]:
    """Bias, penalties and mask, one token at a time, in float32."""
    z = raw.copy()
    for token, bias in params.logit_bias.items():
        z[token] += np.float32(bias)
    for token in {*params.prompt, *params.output}:
        penalty = np.float32(params.repetition_penalty)
        z[token] = z[token] / penalty if z[token] > 0 else z[token] * penalty
        count = np.float32(params.output.count(token))
        z[token] = z[token] - np.float32(params.frequency_penalty) * count
        z[token] = z[token] - np.float32(params.presence_penalty) * np.float32(count > 0)
    for token in params.masked:
        z[token] = np.finfo(np.float32).min
    return z


def distribution(raw: npt.NDArray[np.float32], params: NaiveParams) -> Float64Array:
    """Exact probabilities [V]; equal logits are kept or dropped together."""
    z = edited_logits(raw, params).astype(np.float64)
    order = np.argsort(-z, kind="stable")
    if params.temperature < 1e-5:
        one_hot = np.zeros(len(z))
        one_hot[order[0]] = 1.0
        return one_hot
    p = np.exp((z - z.max()) / params.temperature)
    if 0 < params.top_k < len(z):
        p[z < z[order[params.top_k - 1]]] = 0.0
    p /= p.sum()
    if params.top_p < 1.0:
        mass_before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        num_kept = int(np.count_nonzero(mass_before < params.top_p))
        p[z < z[order[num_kept - 1]]] = 0.0
    if params.min_p > 0.0:
        p[p < params.min_p * p.max()] = 0.0
    if params.top_n_sigma > 0.0:
        sigma = z[z > np.finfo(np.float32).min].std()
        p[z < z.max() - params.top_n_sigma * sigma] = 0.0
    total: Float64Array = p / p.sum()
    return total


def draw(raw: npt.NDArray[np.float32], params: NaiveParams, seed: int, position: int) -> int:
    """The token: argmax of logit / temperature + noise over what `distribution` keeps."""
    p = distribution(raw, params)
    candidates = np.flatnonzero(p)
    if params.temperature < 1e-5:
        return int(candidates[0])
    z = edited_logits(raw, params).astype(np.float64)
    scores = [z[i] / params.temperature + gumbel(seed, position, int(i)) for i in candidates]
    return int(candidates[int(np.argmax(scores))])
