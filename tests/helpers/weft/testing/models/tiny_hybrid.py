"""A small model with recurrent layers, and what it computes, by another formula.

It has the parameters of a small Qwen3. Every second layer is gated linear attention behind a short
convolution in place of attention. The engine continues states; the reference weighs all pairs of a
text's positions, and knows neither states nor chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from weft.checkpoint.config import ModelConfig
from weft.contract.layout import CacheLayout, PagedPlane, StatePart, StatePlane
from weft.engine.model import loader
from weft.engine.model.archs.decoder import Decoder
from weft.engine.model.layers.attention import o_spec, qkv_spec
from weft.engine.model.layers.layer import Layer, Query
from weft.engine.model.step import Step
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.recurrence.sequences import Sequences
from weft.kernels.ops.stream.additions import Normed, Sum
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_models import make_tiny

TAIL = 3
"""Inputs before its own that a position's convolution reads."""
TAPS = (0.3, -0.5, 0.2, 0.9)


def make_hybrid(path: Path, seed: int, **overrides: Any) -> Path:
    """Writes the model's directory; `serve_hybrid` must be on where it is loaded."""
    return make_tiny("qwen3", path, seed, **{"num_hidden_layers": 4, **overrides})


def serve_hybrid(patch: pytest.MonkeyPatch) -> None:
    """Has Qwen3 models load as `TinyHybrid`."""
    patch.setattr(loader, "class_of", lambda config: TinyHybrid)


class GatedRecurrence:
    """Gated linear attention: a `Mixer`."""

    def __init__(self, config: ModelConfig, layer: int, weights: Weights) -> None:
        self.heads, self.dim = (config.num_heads, config.num_kv_heads), config.head_dim
        self._index = layer // 2
        hidden, heads = config.hidden_size, config.num_heads
        self._qkv = weights.linear(qkv_spec(hidden, *self.heads, self.dim, bias=config.qkv_bias))
        self._o = weights.linear(o_spec(hidden, heads, self.dim, bias=config.o_bias))
        self._norms = [
            Norm(weights.norm(name, config.head_dim), config.rms_norm_eps)
            for name in ("q_norm", "k_norm")
        ]

    @property
    def has_own_kv(self) -> bool:
        """See `Mixer.has_own_kv`."""
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        """See `Mixer.move`."""

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        """See `Mixer.prepare`."""
        return step

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Runs the recurrence."""
        assert step.states is not None
        return Query(step.states.run(self._index, [x.linear(self._qkv, None)], self._scan))

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        """Projects the result."""
        return Sum(query.q, self._o, None)

    def folds(self, rows: int, step: Step) -> bool:
        """See `Mixer.folds`."""
        return False

    def shape_key(self) -> object:
        """See `Mixer.shape_key`."""
        return GatedRecurrence

    def _scan(
        self, inputs: Sequence[torch.Tensor], sequences: Sequences, states: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        bounds, outputs, ends, tails = sequences.cu_lens.tolist(), [], [], []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            row, tail = inputs[0][begin:end], states[1][number]
            row = torch.cat((tail, row))
            tails.append(row[-TAIL:])
            q, k, v = self._heads_of(convolved(row)[TAIL:])
            logs = decay(v)[..., 0, 0].log().cumsum(dim=0)
            pairs = torch.einsum("thd,shd->hts", q, k)
            weights = (logs.T[:, :, None] - logs.T[:, None, :]).exp().tril()
            before = (q * logs.exp()[..., None]).transpose(0, 1) @ states[0][number]
            out = (pairs * weights) @ v.transpose(0, 1) + before
            outputs.append(out.transpose(0, 1).flatten(1))
            left = (logs[-1] - logs).exp()[..., None]
            added = (k * left).permute(1, 2, 0) @ v.transpose(0, 1)
            ends.append(states[0][number] * logs[-1].exp()[:, None, None] + added)
        return torch.cat(outputs), [torch.stack(ends), torch.stack(tails)]

    def _heads_of(self, qkv: torch.Tensor) -> list[torch.Tensor]:
        """[T, (Hq + 2 Hkv) D] -> q, k and v, [T, Hq, D] each."""
        heads, kv_heads = self.heads
        parts = [
            part.reshape(len(part), -1, self.dim)
            for part in qkv.split([heads * self.dim, *[kv_heads * self.dim] * 2], dim=1)
        ]
        for at, norm in enumerate(self._norms):
            parts[at] = norm(parts[at].reshape(-1, self.dim).contiguous()).view_as(parts[at])
        return [part.repeat_interleave(heads // part.shape[1], dim=1) for part in parts]


def decay(v: torch.Tensor) -> torch.Tensor:
    """How much of a state remains at a position, [..., H, 1, 1] of v, [..., H, D]."""
    return torch.sigmoid(3.0 + v.mean(dim=-1))[..., None, None]


def convolved(rows: torch.Tensor) -> torch.Tensor:
    """The convolution over positions, [T, C]; zeros before the first one."""
    padded = torch.cat((rows.new_zeros((TAIL, rows.shape[1])), rows))
    taps = [tap * padded[at : at + len(rows)] for at, tap in enumerate(TAPS)]
    return functional.silu(torch.stack(taps).sum(dim=0))


class TinyHybrid(Decoder):
    """The model; layers 1, 3 and so on are recurrent."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        layers = []
        for index, layer in enumerate(self.model.layers):
            assert isinstance(layer, Layer)
            if index % 2:
                own = weights.at("model").at("layers").at(index).of_layer(index).at("self_attn")
                layer = layer._replace(mixer=GatedRecurrence(config, index, own))
            else:
                layer.mixer.move(0, index // 2)
            layers.append(layer)
        self.model = self.model.with_layers(layers)

    def kv_layout(self, page_size: int) -> CacheLayout:
        """See `Model.kv_layout`."""
        config, half = self.config, self.config.num_layers // 2
        heads = {"heads": config.num_kv_heads, "dim": config.head_dim}
        channels = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        states = StatePlane(
            name="gated",
            layers=half,
            parts=(
                StatePart("state", (config.num_heads, *[config.head_dim] * 2), "float32"),
                StatePart("tail", (TAIL, channels), "float32"),
            ),
            ring=(StatePart("qkv", (channels,), "float32"),),
        )
        pages = CacheLayout.of_plane(
            PagedPlane(layers=config.num_layers - half, dtype="float32", **heads), page_size
        )
        return CacheLayout(page_size, pages.groups, states)


class _Pairs(torch.nn.Module):
    """The recurrent layer, from all pairs of positions."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.own = attention

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        own, (rows,) = self.own, hidden_states
        dim = own.head_dim
        q, k, v = (
            convolved(projection(rows)).view(len(rows), -1, dim).transpose(0, 1)
            for projection in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = own.q_norm(q), own.k_norm(k)
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        logs = decay(v)[..., 0, 0].double().log().cumsum(dim=1)
        weights = (logs[:, :, None] - logs[:, None, :]).exp().tril().float()
        out = (q @ k.transpose(1, 2) * weights) @ v
        return own.o_proj(out.transpose(0, 1).flatten(1))[None], None


def reference_hybrid(path: Path) -> torch.nn.Module:
    """The model of a directory, as transformers has it but for the recurrent layers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    for layer in model.model.layers[1::2]:
        layer.self_attn = _Pairs(layer.self_attn)
    return model


def greedy(model: torch.nn.Module, prompt: Sequence[int], num_new: int) -> Choices:
    """The most likely continuation, all tokens computed again for each new one."""
    return Choices(
        lambda tokens: model(torch.tensor([tokens]), use_cache=False).logits[0], prompt, num_new
    )
