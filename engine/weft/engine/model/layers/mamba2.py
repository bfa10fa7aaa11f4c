"""Mamba 2 layers, as in Bamba, Granite 4, Falcon-H1 and Nemotron-H."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from weft.checkpoint.recurrent_config import Mamba2Config
from weft.contract.layout import StatePart
from weft.engine.model.layers.recurrent import Projected, RecurrentMixer, read_taps
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.gated_norm import gated_norm
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.mamba2 import mamba2
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.ops.slot_states import step_heads
from weft.kernels.ops.slot_states.spec import Channels, HeadForm, LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed


@dataclass(eq=False, kw_only=True)
class Mamba2(RecurrentMixer):
    """A state space after a short convolution of x, B and C."""

    kind = "mamba2"

    config: Mamba2Config
    """Sizes on this rank."""
    in_proj: LinearWeight
    """[hidden] -> z, x, B, C and dt."""
    conv: torch.Tensor
    """[taps, channels], the factors of x, B and C in this order."""
    conv_bias: torch.Tensor | None
    """[channels], or None."""
    rates: torch.Tensor
    """[H] float32: negative rates of the decay."""
    dt_bias: torch.Tensor
    """[H] float32."""
    skips: torch.Tensor
    """[H] float32: the factor D on the input that skips the state."""
    norm: torch.Tensor | None
    """[groups, heads of a group * P]: weight of the norm of the result; None: no norm."""

    def __post_init__(self) -> None:
        config = self.config
        self._inner = config.heads * config.head_dim
        self._shared = config.groups * config.state_size
        size, shared = config.state_size, config.heads // config.groups
        # The channel at each position of a block's tail.
        channels = torch.arange(self.conv.shape[1], device=self.conv.device)
        kinds = torch.split(channels, [self._inner, self._shared, self._shared])
        by_group = torch.cat([kind.view(config.groups, -1) for kind in kinds], dim=1).flatten()
        in_tails = by_group.argsort()
        self._orders = None if config.groups == 1 else (in_tails, by_group)
        self._form = HeadForm(
            self.conv,
            self.conv_bias,
            queries=Channels(self._inner + self._shared, size),
            keys=Channels(self._inner, size),
            values=Channels(0, shared * config.head_dim),
            heads=config.heads,
            shared=shared,
            key_dim=size,
            value_dim=config.head_dim,
            rates=self.rates,
            skips=self.skips,
            in_tails=in_tails,
        )

    @classmethod
    def read(
        cls, config: Mamba2Config, hidden: int, layer: int, in_plane: int, weights: Weights
    ) -> Mamba2:
        """Each rank reads whole groups, so that no norm spans several ranks."""
        own, size = weights.shard.of(config.groups, 1, may_repeat=False), weights.shard.size
        local = replace(config, heads=config.heads // size, groups=config.groups // size)
        inner, shared = config.heads * config.head_dim, config.groups * config.state_size
        widths, channels = (inner, inner, shared, shared, config.heads), inner + 2 * shared

        def of_rank(whole: torch.Tensor) -> torch.Tensor:
            return torch.unflatten(whole, 0, (config.groups, -1))[own].flatten(0, 1)

        def vector(name: str, count: int) -> torch.Tensor:
            return weights.tensor(TensorSlice(name, (count,)), torch.float32)

        def of_channels(whole: torch.Tensor) -> torch.Tensor:
            kinds = torch.split(whole, list(widths[1:4]))
            return torch.cat([of_rank(kind) for kind in kinds])

        conv = read_taps(weights, "conv1d", channels, config.taps)
        factors = conv.new_tensor(config.factors[1:4])
        sizes = torch.tensor(widths[1:4], device=conv.device)
        conv *= factors.repeat_interleave(sizes, output_size=channels)[:, None]
        bias = vector("conv1d.bias", channels) if config.conv_bias else None
        into = LinearSpec(
            names=("z", "x", "b", "c", "dt"),
            in_features=hidden,
            rows=widths,
            split="out",
            bias=config.bias,
            fused="in_proj",
        )
        out = LinearSpec(
            names=("out_proj",),
            in_features=inner,
            rows=(hidden,),
            split="in",
            bias=config.out_bias,
        )
        norm = None if config.norm == "none" else of_rank(weights.norm("norm", inner))
        return cls(
            config=local,
            layer=layer,
            in_plane=in_plane,
            in_proj=weights.linear(into),
            conv=of_channels(conv).t().contiguous(),
            conv_bias=None if bias is None else of_channels(bias),
            rates=-of_rank(vector("A_log", config.heads)).exp(),
            dt_bias=of_rank(vector("dt_bias", config.heads)),
            skips=of_rank(vector("D", config.heads)),
            norm=None if norm is None else norm.view(local.groups, -1),
            out_proj=weights.linear(out),
            dtype=weights.dtype_name,
        )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        config = self.config
        state = (config.heads, config.state_size, config.head_dim)
        # By group, so that a rank's groups are one range.
        tail = (config.groups, self.conv.shape[1] // config.groups, config.taps - 1)
        return StatePart("state", state, "float32"), StatePart("conv", tail, self.dtype)

    @property
    def ring(self) -> tuple[StatePart, ...]:
        return (
            StatePart("xbc", (self.conv.shape[1],), self.dtype),
            StatePart("dt", (self.config.heads,), "float32"),
        )

    @property
    def found(self) -> tuple[StatePart, ...]:
        config = self.config
        return (
            StatePart("key", (config.groups, config.state_size), self.dtype),
            StatePart("update", (config.heads, config.head_dim), self.dtype),
        )

    def project(self, x: Normed, step: Step) -> Projected:
        config = self.config
        widths = [self._inner, self.conv.shape[1], config.heads]
        added = step.added("state_in", self.layer)
        z, xbc, dt = torch.split(x.linear(self.in_proj, added), widths, dim=1)
        if config.factors[0] != 1.0:
            z = z * config.factors[0]
        if config.factors[4] != 1.0:
            dt = dt.float() * config.factors[4]
        steps = F.softplus(dt + self.dt_bias)
        if config.least_step > 0.0 or config.largest_step is not None:
            steps = steps.clamp(min=config.least_step, max=config.largest_step)
        return Projected((xbc, steps), torch.unflatten(z, 1, (config.groups, -1)))

    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (xbc, dt), (state, tail), config = inputs, states, self.config
        before = tail.flatten(1, 2)
        if self._orders is not None:
            before = before.index_select(1, self._orders[0])
        mixed, tail = short_conv(xbc, self.conv, self.conv_bias, before, sequences, has_silu=True)
        x, b, c = torch.split(mixed, [self._inner, self._shared, self._shared], dim=1)
        x = torch.unflatten(x, 1, (config.heads, config.head_dim))
        b, c = (torch.unflatten(part, 1, (config.groups, config.state_size)) for part in (b, c))
        out, state = mamba2(x, dt, self.rates, b, c, self.skips, state, sequences)
        if self._orders is not None:
            tail = tail.index_select(1, self._orders[1])
        return out, (state, torch.unflatten(tail, 1, (config.groups, -1)))

    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return step_heads(self._form, rows, memory, inputs)

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        first = self.config.norm == "behind gate"
        grouped = out.reshape(gate.shape)
        normed = gated_norm(grouped, gate, self.norm, self.config.eps, gates_first=first)
        return normed.flatten(1)
