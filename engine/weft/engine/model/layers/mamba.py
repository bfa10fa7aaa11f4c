"""Mamba layers with norms of dt, B and C, as in Jamba."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from weft.checkpoint.recurrent_config import MambaConfig
from weft.contract.layout import StatePart
from weft.engine.model.layers.recurrent import Projected, RecurrentMixer, read_taps
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.gated_norm import gated_norm
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.selective_scan import selective_scan
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.ops.slot_states.spec import LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed


class _Selection(NamedTuple):
    x_proj: LinearWeight
    dt_proj: LinearWeight
    norms: tuple[Norm, Norm, Norm]
    """The norms of the narrow dt, of B and of C."""
    dt_bias: torch.Tensor
    """[channels] float32."""


@dataclass(eq=False, kw_only=True)
class Mamba(RecurrentMixer):
    """A state space for each channel, after a short convolution."""

    kind = "mamba"

    config: MambaConfig
    in_proj: LinearWeight
    """[hidden] -> x and z."""
    conv: torch.Tensor
    """[taps, channels]."""
    conv_bias: torch.Tensor | None
    """[channels], or None."""
    selection: _Selection
    rates: torch.Tensor
    """[N, channels] float32: negative rates of the decay."""
    skips: torch.Tensor
    """[channels] float32: the factor D on the input that skips the state."""

    @classmethod
    def read(
        cls, config: MambaConfig, hidden: int, layer: int, in_plane: int, weights: Weights
    ) -> Mamba:
        width, size, rank = config.width, config.state_size, config.rank

        def product(rows: tuple[int, ...], fused: str, columns: int, bias: bool) -> LinearWeight:
            names = tuple(f"{fused}.{number}" for number in range(len(rows)))
            spec = LinearSpec(names=names, in_features=columns, rows=rows, bias=bias, fused=fused)
            return weights.linear(spec)

        def wide(name: str, *shape: int) -> torch.Tensor:
            return weights.tensor(TensorSlice(name, shape), torch.float32)

        norms = [
            Norm(weights.norm(f"{name}_layernorm", count), config.eps)
            for name, count in (("dt", rank), ("b", size), ("c", size))
        ]
        return cls(
            config=config,
            layer=layer,
            in_plane=in_plane,
            in_proj=product((width, width), "in_proj", hidden, config.bias),
            conv=read_taps(weights, "conv1d", width, config.taps).t().contiguous(),
            conv_bias=wide("conv1d.bias", width) if config.conv_bias else None,
            selection=_Selection(
                product((rank, size, size), "x_proj", width, False),
                product((width,), "dt_proj", rank, False),
                (norms[0], norms[1], norms[2]),
                wide("dt_proj.bias", width),
            ),
            rates=-wide("A_log", width, size).exp().t().contiguous(),
            skips=wide("D", width),
            out_proj=product((hidden,), "out_proj", width, config.bias),
            dtype=weights.dtype_name,
        )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        config = self.config
        return (
            StatePart("state", (config.state_size, config.width), "float32"),
            StatePart("conv", (config.width, config.taps - 1), self.dtype),
        )

    @property
    def ring(self) -> tuple[StatePart, ...]:
        return (StatePart("x", (self.config.width,), self.dtype),)

    def project(self, x: Normed, step: Step) -> Projected:
        added = step.added("state_in", self.layer)
        values, gate = x.linear(self.in_proj, added).chunk(2, dim=1)
        return Projected((values,), gate)

    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (values,), (state, tail), config = inputs, states, self.config
        x, tail = short_conv(values, self.conv, self.conv_bias, tail, sequences, has_silu=True)
        found = linear(x, self.selection.x_proj)
        parts = torch.split(found, [config.rank, config.state_size, config.state_size], dim=1)
        low, b, c = (
            norm(part.contiguous()) for norm, part in zip(self.selection.norms, parts, strict=True)
        )
        dt = F.softplus(linear(low, self.selection.dt_proj).float() + self.selection.dt_bias)
        out, state = selective_scan(x, dt, self.rates, b, c, self.skips, state, sequences)
        return out, (state, tail)

    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        raise AssertionError("models with such layers are not loaded on a GPU")

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(out[:, None], gate[:, None], None, self.config.eps)[:, 0]
