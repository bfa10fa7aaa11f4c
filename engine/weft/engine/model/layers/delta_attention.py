"""Kimi Delta Attention: the gated delta rule with a decay for each element of a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from weft.checkpoint.recurrent_config import DeltaAttentionConfig
from weft.contract.layout import StatePart
from weft.engine.model.layers.recurrent import Projected, RecurrentMixer, read_taps
from weft.engine.model.step import Step
from weft.engine.model.weights.reader import TensorSlice
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.gated_delta import gated_delta
from weft.kernels.ops.gated_norm import gated_norm
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.short_conv import short_conv
from weft.kernels.ops.slot_states import step_heads
from weft.kernels.ops.slot_states.spec import Channels, HeadForm, LayerMemory, SlotRows
from weft.kernels.ops.stream.additions import Normed


class _Projections(NamedTuple):
    qkv: LinearWeight
    beta: LinearWeight
    low: LinearWeight | None
    """[hidden] -> the narrow inputs of `decay` and `gate`; None: these take the layer's input."""
    decay: LinearWeight
    gate: LinearWeight


@dataclass(eq=False, kw_only=True)
class DeltaAttention(RecurrentMixer):
    """The delta rule after short convolutions of q, k and v. Rows of inputs have q, k and v of one
    head after another, so that a rank's heads are one range.
    """

    kind = "delta-attention"

    config: DeltaAttentionConfig
    """Sizes over all ranks."""
    projections: _Projections
    conv: torch.Tensor
    """[taps, channels], in the order of rows of inputs."""
    rates: torch.Tensor
    """[H, 1] float32: negative rates of the decay. Here and below H counts this rank's heads."""
    dt_bias: torch.Tensor
    """[H, D] float32."""
    norm: torch.Tensor
    """[D]: weight of the norm of each head's result."""

    def __post_init__(self) -> None:
        self.heads, dim = self.rates.shape[0], self.config.dim
        first, second, third = (Channels(at, 3 * dim) for at in (0, dim, 2 * dim))
        sizes = self.heads, 1, dim, dim
        self._form = HeadForm(
            self.conv, None, first, second, third, *sizes, dim**-0.5, is_unit=True
        )

    @classmethod
    def read(
        cls,
        config: DeltaAttentionConfig,
        hidden: int,
        layer: int,
        in_plane: int,
        weights: Weights,
        out: str,
    ) -> DeltaAttention:
        """`out` names the output projection."""
        heads, dim, taps = config.heads, config.dim, config.taps
        own, width = weights.shard.of(heads, 1, may_repeat=False), heads * dim

        def product(
            width_in: int, *names: str, rows: int = width, is_split: bool = True
        ) -> LinearWeight:
            spec = LinearSpec(
                names=names,
                in_features=width_in,
                rows=(rows,) * len(names),
                split="out" if is_split else "none",
            )
            return weights.linear(spec)

        kinds = [read_taps(weights, f"{name}_conv1d", width, taps) for name in "qkv"]
        conv = torch.stack([kind.view(heads, dim, taps) for kind in kinds], dim=1)
        shape = weights.shape_of("A_log")
        shape = (heads,) if shape == (heads,) else (1, 1, heads, 1)
        rates = weights.tensor(TensorSlice("A_log", shape), torch.float32).exp()
        dt_bias = weights.tensor(TensorSlice("dt_bias", (width,)), torch.float32)
        if config.is_low_rank:
            low = product(hidden, "f_a_proj", "g_a_proj", rows=dim, is_split=False)
            decay, gate = product(dim, "f_b_proj"), product(dim, "g_b_proj")
        else:
            low, decay, gate = None, product(hidden, "f_proj"), product(hidden, "g_proj")
        last = LinearSpec(names=(out,), in_features=width, rows=(hidden,), split="in")
        return cls(
            config=config,
            layer=layer,
            in_plane=in_plane,
            projections=_Projections(
                qkv=product(hidden, "q_proj", "k_proj", "v_proj"),
                beta=product(hidden, "b_proj", rows=heads),
                low=low,
                decay=decay,
                gate=gate,
            ),
            conv=conv[own].flatten(0, 2).t().contiguous(),
            rates=-rates.view(heads, 1)[own],
            dt_bias=dt_bias.view(heads, dim)[own],
            norm=weights.norm("o_norm", dim),
            out_proj=weights.linear(last),
            dtype=weights.dtype_name,
        )

    @property
    def parts(self) -> tuple[StatePart, ...]:
        dim = self.config.dim
        tail = (self.conv.shape[1], self.config.taps - 1)
        return (
            StatePart("state", (self.heads, dim, dim), "float32"),
            StatePart("conv", tail, self.dtype),
        )

    @property
    def ring(self) -> tuple[StatePart, ...]:
        return (
            StatePart("qkv", (self.conv.shape[1],), self.dtype),
            StatePart("decay", (self.heads, self.config.dim), "float32"),
            StatePart("beta", (self.heads,), "float32"),
        )

    @property
    def found(self) -> tuple[StatePart, ...]:
        shape = self.heads, self.config.dim
        return StatePart("key", shape, self.dtype), StatePart("update", shape, self.dtype)

    def project(self, x: Normed, step: Step) -> Projected:
        products, of_heads = self.projections, (self.heads, self.config.dim)
        qkv = x.linear(products.qkv, step.added("state_in", self.layer))
        by_kind = qkv.view(len(qkv), 3, *of_heads)
        to_decay = to_gate = x.value
        if products.low is not None:
            low = x.linear(products.low, None).chunk(2, dim=1)
            to_decay, to_gate = (part.contiguous() for part in low)
        decay = self._decay(torch.unflatten(linear(to_decay, products.decay), 1, of_heads))
        beta = x.linear(products.beta, None).sigmoid().float()
        gate = torch.unflatten(linear(to_gate, products.gate), 1, of_heads)
        return Projected((by_kind.transpose(1, 2).flatten(1), decay, beta), gate)

    def _decay(self, projected: torch.Tensor) -> torch.Tensor:
        """Logarithms of the decays, [T, H, D] float32."""
        wide, least = projected.float() + self.dt_bias, self.config.least_decay
        if least is None:
            return self.rates * F.softplus(wide)
        return least * torch.sigmoid(-self.rates * wide)

    def scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        (qkv, decay, beta), (state, tail) = inputs, states
        mixed, tail = short_conv(qkv, self.conv, None, tail, sequences, has_silu=True)
        q, k, v = torch.unflatten(mixed, 1, (self.heads, 3, self.config.dim)).unbind(2)
        out, state = gated_delta(q, k, v, decay, beta, state, sequences)
        return out, (state, tail)

    def few_rows(
        self, rows: SlotRows, memory: LayerMemory, inputs: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        return step_heads(self._form, rows, memory, inputs)

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return gated_norm(out, gate, self.norm, self.config.eps, form="sigmoid").flatten(1)
