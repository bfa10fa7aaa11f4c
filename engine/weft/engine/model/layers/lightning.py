"""Lightning attention: linear attention with a fixed decay for each head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from weft.checkpoint.recurrent_config import LightningConfig, Mamba2Config
from weft.contract.errors import ModelError
from weft.engine.model.layers.mamba2 import Mamba2
from weft.engine.model.layers.recurrent import Projected
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.stream.additions import Normed

_TAPS = 2
"""Fewest taps that a convolution may have."""


@dataclass(eq=False, kw_only=True)
class Lightning(Mamba2):
    """Mamba 2's recurrence with time steps of 1, after SiLU alone.

    Keys are its B, queries its C and values its x. The convolution passes each row's own numbers
    on, so that the SiLU after it is this layer's SiLU.
    """

    kind = "lightning"

    gate: LinearWeight
    """[hidden] -> factors on all heads' results, before their sigmoid."""
    whole_norm: Norm
    """The norm of all heads' results together."""

    @classmethod
    def of(
        cls, config: LightningConfig, hidden: int, layer: int, in_plane: int, weights: Weights
    ) -> Lightning:
        """Raises ModelError if several ranks share the model, since the norm is over all heads."""
        if weights.shard.size > 1:
            raise ModelError(f"{weights.full_name('')}: lightning attention is not divided by rank")
        heads, dim = config.heads, config.dim
        width = heads * dim
        qkv = LinearSpec(
            names=("q", "k", "v"),
            in_features=hidden,
            rows=(width, width, width),
            fused="qkv_proj",
            groups=heads,
        )
        gate = LinearSpec(names=("output_gate",), in_features=hidden, rows=(width,))
        out = LinearSpec(names=("out_proj",), in_features=width, rows=(hidden,))
        # Later layers forget more slowly.
        share = 1.0 - layer / (config.num_layers - 1 + 1e-5) + 1e-5
        numbers = torch.arange(1, heads + 1, dtype=torch.float32, device=weights.device)
        rates = -share * torch.exp2(-8.0 / heads * numbers)
        conv = torch.zeros((_TAPS, 3 * width), device=rates.device)
        conv[-1] = 1.0
        none = torch.zeros_like(rates)
        sizes = Mamba2Config(
            heads=heads,
            head_dim=dim,
            groups=heads,
            state_size=dim,
            taps=_TAPS,
            eps=config.eps,
            norm="none",
        )
        return cls(
            config=sizes,
            layer=layer,
            in_plane=in_plane,
            in_proj=weights.linear(qkv),
            conv=conv,
            conv_bias=None,
            rates=rates,
            dt_bias=none,
            skips=none,
            norm=None,
            gate=weights.linear(gate),
            whole_norm=Norm(weights.norm("norm", width), config.eps),
            out_proj=weights.linear(out),
            dtype=weights.dtype_name,
        )

    def project(self, x: Normed, step: Step) -> Projected:
        q, k, v = x.linear(self.in_proj, None).chunk(3, dim=1)
        time_steps = torch.ones((len(q), self.config.heads), device=q.device)
        return Projected((torch.cat((v, k, q), dim=1), time_steps), x.linear(self.gate, None))

    def gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = self.whole_norm(out.reshape(gate.shape).contiguous())
        return normed * torch.sigmoid(gate)
