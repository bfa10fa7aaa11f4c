"""Gated delta nets: the linear attention of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from weft.checkpoint.recurrent_config import GatedDeltaConfig
from weft.contract.layout import StatePart
from weft.engine.model.layers.recurrent import Projected, RecurrentMixer, by_head, read_taps
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.gated_delta import delta_gates, gated_delta
from weft.kernels.ops.gated_norm import gated_norm
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.ops.slot_states import step_delta
from weft.kernels.ops.slot_states.spec import Channels, DeltaGates, HeadForm, LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed


@dataclass(eq=False, kw_only=True)
class GatedDelta(RecurrentMixer):
    """The gated delta rule after a short convolution of q, k and v.

    Rows of inputs have their channels in the products' order: either one key head after another,
    each with its value heads, or all of q, then k, then v. Blocks always have the former order, so
    that a rank's heads are one range.
    """

    kind = "gated-delta"

    config: GatedDeltaConfig
    """Sizes over all ranks."""
    projections: tuple[LinearWeight, ...]
    """Projections to qkvz and ba of each key head, or to q, k and v, to z, and to b and a."""
    conv: torch.Tensor
    """[taps, channels] of this rank, one key head after another."""
    rates: torch.Tensor
    """[Hv] float32: negative rates of the decay of this rank's value heads."""
    dt_bias: torch.Tensor
    """[Hv] float32."""
    norm: torch.Tensor
    """[Dv]: weight of the norm of each head's result."""

    def __post_init__(self) -> None:
        config, conv = self.config, self.conv
        self.value_heads = self.rates.shape[0]
        self._shared = config.value_heads // config.key_heads
        self.key_heads = self.value_heads // self._shared
        key, values = config.key_dim, self._shared * config.value_dim
        step, in_tails = 2 * key + values, None
        channels = (Channels(0, step), Channels(key, step), Channels(2 * key, step))
        if not config.is_fused:
            all_keys = self.key_heads * key
            channels = (Channels(0, key), Channels(all_keys, key), Channels(2 * all_keys, values))
            numbers = torch.arange(conv.shape[1], device=conv.device).view(self.key_heads, step)
            kinds = torch.split(numbers, [key, key, values], dim=1)
            in_tails = torch.cat([kind.flatten() for kind in kinds])
            # From here on in the order of the products' rows.
            self.conv = conv[:, in_tails].contiguous()
        self._form = HeadForm(
            self.conv,
            None,
            *channels,
            heads=self.value_heads,
            shared=self._shared,
            key_dim=key,
            value_dim=config.value_dim,
            scale=key**-0.5,
            is_unit=True,
            in_tails=in_tails,
        )
        # One product holds beta and then the decay, of all heads or of each key head in turn.
        shared = self._shared if config.is_fused else self.value_heads
        self._gates = DeltaGates(self.rates, self.dt_bias, shared)
        self._of_tails = None if in_tails is None else in_tails.argsort()

    @classmethod
    def read(
        cls, config: GatedDeltaConfig, hidden: int, layer: int, in_plane: int, weights: Weights
    ) -> GatedDelta:
        heads, shard = config.key_heads, weights.shard
        shared = config.value_heads // heads
        own = shard.of(heads, 1, may_repeat=False)
        values = slice(own.start * shared, own.stop * shared)
        keys, all_values = heads * config.key_dim, config.value_heads * config.value_dim

        def product(names: tuple[str, ...], *rows: int, fused: str | None = None) -> LinearWeight:
            spec = LinearSpec(names=names, in_features=hidden, rows=rows, split="out", fused=fused)
            return weights.linear(spec)

        def of_heads(name: str) -> torch.Tensor:
            part = TensorSlice(name, (config.value_heads,), (values,))
            return weights.tensor(part, torch.float32)

        projections: tuple[LinearWeight, ...]
        if config.is_fused:
            projections = (
                product(("in_proj_qkvz",), 2 * keys + 2 * all_values),
                product(("in_proj_ba",), 2 * config.value_heads),
            )
        else:
            projections = (
                product(("q", "k", "v"), keys, keys, all_values, fused="in_proj_qkv"),
                product(("in_proj_z",), all_values),
                product(("in_proj_b", "in_proj_a"), config.value_heads, config.value_heads),
            )
        widths = (config.key_dim, config.key_dim, shared * config.value_dim)
        conv = by_head(
            read_taps(weights, "conv1d", heads * sum(widths), config.taps), heads, widths
        )
        out = LinearSpec(names=("out_proj",), in_features=all_values, rows=(hidden,), split="in")
        return cls(
            config=config,
            layer=layer,
            in_plane=in_plane,
            projections=projections,
            conv=conv[own].flatten(0, 1).t().contiguous(),
            rates=-of_heads("A_log").exp(),
            dt_bias=of_heads("dt_bias"),
            norm=weights.norm("norm", config.value_dim),
            out_proj=weights.linear(out),
            dtype=weights.dtype_name,
        )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        config = self.config
        state = (self.value_heads, config.key_dim, config.value_dim)
        tail = (self.conv.shape[1], config.taps - 1)
        return StatePart("state", state, "float32"), StatePart("conv", tail, self.dtype)

    @property
    def ring(self) -> tuple[StatePart, ...]:
        return (
            StatePart("qkv", (self.conv.shape[1],), self.dtype),
            StatePart("decay", (self.value_heads,), "float32"),
            StatePart("beta", (self.value_heads,), "float32"),
        )

    @property
    def found(self) -> tuple[StatePart, ...]:
        return (
            StatePart("key", (self.key_heads, self.config.key_dim), self.dtype),
            StatePart("update", (self.value_heads, self.config.value_dim), self.dtype),
        )

    def project(self, x: Normed, step: Step) -> Projected:
        added = [step.added("state_in", self.layer), step.added("state_gates", self.layer)]
        if not self.config.is_fused:
            added.insert(1, step.added("state_z", self.layer))
        found = [x.linear(w, one) for w, one in zip(self.projections, added, strict=True)]
        rows, config = len(found[0]), self.config
        of_values = self._shared * config.value_dim
        if config.is_fused:
            qkvz = found[0].view(rows, self.key_heads, -1)
            qkv, z = torch.split(qkvz, [2 * config.key_dim + of_values, of_values], dim=2)
        else:
            qkv, z = found[:2]
        gate = z.view(rows, self.key_heads, self._shared, config.value_dim)
        return Projected((qkv, found[-1]), gate)

    def ring_inputs(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        qkv, ba = inputs
        return qkv.flatten(1), *delta_gates(ba, *self._gates)

    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (qkv, decay, beta), (state, tail), form = inputs, states, self._form
        before = tail if form.in_tails is None else tail.index_select(1, form.in_tails)
        mixed, tail = short_conv(qkv, self.conv, None, before, sequences, has_silu=True)
        if self._of_tails is not None:
            tail = tail.index_select(1, self._of_tails)
        config = self.config
        widths = [config.key_dim, config.key_dim, self._shared * config.value_dim]
        if config.is_fused:
            q, k, v = torch.split(torch.unflatten(mixed, 1, (self.key_heads, -1)), widths, dim=2)
        else:
            kinds = torch.split(mixed, [self.key_heads * width for width in widths], dim=1)
            q, k, v = (torch.unflatten(kind, 1, (self.key_heads, -1)) for kind in kinds)
        v = v.reshape(len(v), self.value_heads, config.value_dim)
        out, state = gated_delta(q, k, v, decay, beta, state, sequences)
        return out, (state, tail)

    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        qkv, ba = inputs
        return step_delta(self._form, self._gates, rows, memory, (qkv, ba))

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(out, gate, self.norm, self.config.eps).flatten(1)
