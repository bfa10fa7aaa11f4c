"""Types of activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""gelu: exact; gelu_tanh: its approximation by tanh (Hendrycks and Gimpel 2016); relu: max(x, 0);
relu2: its square (So et al. 2021).
"""


class Gating(NamedTuple):
    """gate * sigmoid(alpha * gate + cubic * gate**3) * (up + offset), both limited before.

    SwiGLU (Shazeer 2020, arXiv 2002.05202) by default; gpt-oss limits both sides and has another
    slope and offset (its model card, section 2.2). `GELU_TANH` is such a gate too, since
    0.5 * (1 + tanh(x)) = sigmoid(2 * x).
    """

    alpha: float = 1.0
    limit: float | None = None
    """Largest gate, and largest magnitude of up; None: any."""
    offset: float = 0.0
    cubic: float = 0.0
    gate_limit: float | None = None
    """Largest gate, where it is not `limit`."""

    @property
    def largest_gate(self) -> float | None:
        return self.limit if self.gate_limit is None else self.gate_limit

    @property
    def in_kernels(self) -> Gating:
        """The same with both limits set, as kernels take it."""
        return self._replace(gate_limit=self.largest_gate)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I], gate columns first -> [T, I], dtype of `x`; float32 within, or wider."""
        gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
        if self.largest_gate is not None:
            gate = gate.clamp(max=self.largest_gate)
        if self.limit is not None:
            up = up.clamp(-self.limit, self.limit)
        slope = self.alpha * gate + self.cubic * gate**3 if self.cubic else self.alpha * gate
        return (gate * torch.sigmoid(slope) * (up + self.offset)).to(x.dtype)


SILU = Gating()
"""silu(gate) * up."""
_SLOPE = (8 / math.pi) ** 0.5
GELU_TANH = Gating(alpha=_SLOPE, cubic=0.044715 * _SLOPE)
"""gelu(gate) * up, with the approximation by tanh."""


class XIELU(NamedTuple):
    """An activation with parameters that each layer has learned (arXiv 2411.13010): quadratic above
    zero, exponential below.
    """

    alpha_p: torch.Tensor
    """Curvature above zero: [1] float32 on the model's device."""
    alpha_n: torch.Tensor
    """Factor on the exponential part below zero, as `alpha_p`."""
    beta: float = 0.5
    """Slope at zero."""
    eps: float = -1e-6
    """Largest argument of the exponential function."""

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, I], dtype of `x`; float32 within, or wider."""
        wide = x if x.dtype == torch.float64 else x.float()
        below = torch.expm1(wide.clamp(max=self.eps)) - wide
        made = torch.where(wide > 0, self.alpha_p * wide.square(), self.alpha_n * below)
        return (made + self.beta * wide).to(x.dtype)


class GaussianTopK(NamedTuple):
    """activation(max(gate - cutoff, 0)) * up: of gates that are normally distributed in a row, the
    cutoff leaves a wanted share above it (Gaussian top-k of Gemma 3n; Spark Transformer, arXiv
    2506.06644).
    """

    deviations: float
    """How many standard deviations the cutoff is above the mean of a row's gates."""
    activation: Activation

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * I], gate columns first -> [T, I], dtype of `x`; float32 within, or wider."""
        gate, up = (x if x.dtype == torch.float64 else x.float()).chunk(2, dim=-1)
        deviation, mean = torch.std_mean(gate, dim=-1, correction=0, keepdim=True)
        above = F.relu(gate - (mean + deviation * self.deviations))
        return (ACTIVATIONS[self.activation](above) * up).to(x.dtype)


ACTIVATIONS: Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: x.clamp(min=0).square(),
}


def limited_silu(limit: float) -> Gating:
    """SwiGLU whose activated gate is at most `limit`, and what it gates no larger in magnitude.

    SiLU rises wherever it is positive, so the gate is limited before it instead.
    """
    low, high = 0.0, limit + 1.0
    while (middle := (low + high) / 2) not in (low, high):
        is_beyond = middle / (1.0 + math.exp(-middle)) > limit
        low, high = (low, middle) if is_beyond else (middle, high)
    return Gating(limit=limit, gate_limit=low)
