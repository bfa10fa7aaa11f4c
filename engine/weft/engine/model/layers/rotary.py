"""Tables of the rotary position embedding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from weft.checkpoint.rope import RopeConfig
from weft.contract.errors import ModelError
from weft.engine.model.weights.refill import Constant


class Rotary(NamedTuple):
    cos_sin: torch.Tensor
    """[max_positions, D] float32, from `cos_sin_table`; with one row heads are not rotated."""
    num_adjacent: int = 0
    """Pairs of adjacent elements that are rotated together, as in `rope_and_cache`."""


class AxisTurns:
    """Rotations by positions along several axes, each of which turns some pairs of a head."""

    def __init__(self, cos_sin: torch.Tensor, axes: Sequence[int]) -> None:
        """`axes` are those of the rotated pairs, which come first in the table `cos_sin`."""
        self._table = cos_sin
        pairs = cos_sin.shape[1] // 2
        # Cosine and sine of further pairs are the same at all positions.
        of_pairs = torch.tensor([*axes, *[0] * (pairs - len(axes))], dtype=torch.int64)
        self._axes = of_pairs.repeat(2).to(cos_sin.device)
        self._columns = torch.arange(2 * pairs, device=cos_sin.device)

    def of(self, axes: torch.Tensor) -> torch.Tensor:
        """[T, axes] int64 positions -> [T, D] float32, in the form of a table of rotations."""
        return self._table[axes[:, self._axes], self._columns]


class Rotaries:
    """The rotations of a model's layers. Equal rotations share a table."""

    def __init__(
        self, head_dim: int, max_positions: int, device: torch.device, constant: Constant
    ) -> None:
        self._size = (head_dim, max_positions)
        self._device, self._constant = device, constant
        self._made: dict[tuple[RopeConfig | None, int], Rotary] = {}

    def of(self, rope: RopeConfig | None, head_dim: int | None = None) -> Rotary:
        """The rotation that a configuration describes; None: heads are not rotated. `head_dim` is
        for heads of another width than the model's.
        """
        dim, positions = head_dim or self._size[0], self._size[1]
        key = rope, dim
        if key not in self._made:
            table = (RopeConfig(theta=1.0), dim, 1) if rope is None else (rope, dim, positions)
            made = self._constant(table, lambda: cos_sin_table(*table).to(self._device))
            self._made[key] = Rotary(made) if rope is None else Rotary(made, rope.num_adjacent(dim))
        return self._made[key]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[rotary_dim / 2] float32: radians per position for each pair of elements that is rotated.
    Raises ModelError if LongRoPE has a wrong number of factors.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    if rope.scaling == "longrope":
        factors = torch.tensor(rope.wavelength_factors, dtype=torch.float32)
        if len(factors) != len(exponents):
            raise ModelError(f"{len(factors)} factors of LongRoPE for {len(exponents)} pairs")
        return 1.0 / (factors * rope.theta**exponents)
    frequencies = 1.0 / rope.theta**exponents
    if rope.scaling == "linear":
        return frequencies / rope.factor
    if rope.scaling == "llama3":
        return _stretch_low(frequencies, rope)
    if rope.scaling == "yarn":
        return _stretch_by_turns(frequencies, rope, dim)
    if rope.scaling == "proportional":
        frequencies[int(rope.partial * dim // 2) :] = 0.0
        return frequencies / rope.factor
    return frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_positions: int) -> torch.Tensor:
    """[max_positions, head_dim] float32: the cosines of head_dim / 2 pairs, then the sines. Pairs
    that are not rotated come last.
    """
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    rest = head_dim // 2 - angles.shape[1]
    if rest:
        cos = torch.cat((cos, cos.new_ones(max_positions, rest)), dim=-1)
        sin = torch.cat((sin, sin.new_zeros(max_positions, rest)), dim=-1)
    return torch.cat((cos, sin), dim=-1)


def _stretch_low(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Llama 3.1's context extension: long wavelengths are stretched, short ones kept, with a ramp
    between.
    """
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / rope.factor)


def _stretch_by_turns(frequencies: torch.Tensor, rope: RopeConfig, dim: int) -> torch.Tensor:
    """YaRN's context extension (arXiv 2309.00071, section 3.2): as Llama 3.1's, with a ramp over
    the number of the pair.
    """

    def pair_of(turns: float) -> float:
        wavelengths = rope.original_max_positions / (turns * 2 * math.pi)
        return dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    stretched = ramp.clamp(0.0, 1.0)
    return frequencies / rope.factor * stretched + frequencies * (1.0 - stretched)
