"""Short convolutions between two gates: the layers of LFM2 without attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weft.checkpoint.recurrent_config import ShortConvConfig
from weft.contract.layout import StatePart
from weft.engine.model.layers.recurrent import Projected, RecurrentMixer, read_taps
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.ops.slot_states import step_conv
from weft.kernels.ops.slot_states.spec import LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed


@dataclass(eq=False, kw_only=True)
class GatedConv(RecurrentMixer):
    """C * conv(B * x), for each channel by itself."""

    kind = "short-conv"

    in_proj: LinearWeight
    """[hidden] -> B, C and x."""
    conv: torch.Tensor
    """[taps, channels] of this rank."""
    conv_bias: torch.Tensor | None
    """[channels], or None."""

    @classmethod
    def read(
        cls, config: ShortConvConfig, hidden: int, layer: int, in_plane: int, weights: Weights
    ) -> GatedConv:
        width, bias = config.width, config.bias
        own = weights.shard.of(width, 1, may_repeat=False)
        into = LinearSpec(
            names=("b", "c", "x"),
            in_features=hidden,
            rows=(width,) * 3,
            split="out",
            bias=bias,
            fused="in_proj",
        )
        out = LinearSpec(
            names=("out_proj",), in_features=width, rows=(hidden,), split="in", bias=bias
        )
        part = TensorSlice("conv.bias", (width,), (own,))
        return cls(
            layer=layer,
            in_plane=in_plane,
            in_proj=weights.linear(into),
            conv=read_taps(weights, "conv", width, config.taps)[own].t().contiguous(),
            conv_bias=weights.tensor(part, torch.float32) if bias else None,
            out_proj=weights.linear(out),
            dtype=weights.dtype_name,
        )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        taps, channels = self.conv.shape
        return (StatePart("conv", (channels, taps - 1), self.dtype),)

    @property
    def ring(self) -> tuple[StatePart, ...]:
        return (StatePart("bx", (self.conv.shape[1],), self.dtype),)

    def project(self, x: Normed, step: Step) -> Projected:
        added = step.added("state_in", self.layer)
        b, c, values = x.linear(self.in_proj, added).chunk(3, dim=1)
        return Projected((b * values,), c)

    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (bx,), (tail,) = inputs, states
        out, tail = short_conv(bx, self.conv, self.conv_bias, tail, sequences, has_silu=False)
        return out, (tail,)

    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return step_conv(self.conv, self.conv_bias, rows, memory, inputs[0])

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gate * out
