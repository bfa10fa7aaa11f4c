"""Decoder layers whose rows have adapters, and the same arithmetic written out, in any dtype."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.model.layers.attention import Attention
from weft.engine.model.layers.layer import Layer
from weft.engine.model.layers.mlp import GatedMLP
from weft.engine.model.stack import Run, run_all
from weft.engine.model.step import Step
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.lora import sort_tokens
from weft.kernels.ops.lora.spec import LoraSegments, LoraStep
from weft.kernels.ops.norm import Norm
from weft.testing.kernels.layer_cases import make_cos_sin, step_of
from weft.testing.kernels.lora_cases import LoraCase, draw_slots, make_lora

LAYERS, PAGE_SIZE, MAX_CONTEXT, EPS = 2, 16, 40, 1e-5
GROUPS = {"qkv": ("q", "k", "v"), "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}


class Sizes(NamedTuple):
    """Sizes of a model."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    dim: int

    @property
    def projections(self) -> dict[str, tuple[int, int, int]]:
        """Width in and out, and first column in the product."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        return {
            "q": (self.hidden, q, 0),
            "k": (self.hidden, kv, q),
            "v": (self.hidden, kv, q + kv),
            "o": (q, self.hidden, 0),
            "gate": (self.hidden, self.inner, 0),
            "up": (self.hidden, self.inner, self.inner),
            "down": (self.inner, self.hidden, 0),
        }


@dataclass(frozen=True, slots=True)
class LayersCase:
    """A decode step: each row is a request of its own."""

    sizes: Sizes
    run: Run
    weights: list[dict[str, torch.Tensor]]
    """Weights of each layer: each group's product, and the two norms."""
    adapters: dict[str, LoraCase]
    slots: list[int]
    lora: LoraStep
    hidden: torch.Tensor
    """[T, H]."""
    pool: torch.Tensor
    kv_lens: torch.Tensor
    """[T] int32."""
    pages: torch.Tensor
    """[T, pages] int32."""
    cos_sin: torch.Tensor

    def output(self, lora: LoraStep | None) -> torch.Tensor:
        """The layers' output for `hidden`; K and V are in the pool afterwards."""
        return run_all([self.run], self.hidden.clone(), self.step(lora), self.pool)

    def step(self, lora: LoraStep | None) -> Step:
        """The step over the pool."""
        rows = len(self.slots)
        positions = self.kv_lens.long() - 1
        page = self.pages.gather(1, (positions // PAGE_SIZE)[:, None])[:, 0].long()
        group = AttentionMetadata(
            page_table=self.pages,
            places=page * PAGE_SIZE + positions % PAGE_SIZE,
            cu_q_lens=torch.arange(rows + 1, dtype=torch.int32, device=self.pool.device),
            kv_lens=self.kv_lens,
            max_q_len=1,
            max_kv_len=MAX_CONTEXT,
        )
        return step_of(positions, group, lora)

    def written_out(self, dtype: torch.dtype) -> torch.Tensor:
        """The layers' output for `hidden` in eager torch: an adapter is A and then B beside the
        product, as in PEFT.
        """
        hidden = self.hidden.to(dtype)
        for layer in range(LAYERS):
            w = {name: value.to(dtype) for name, value in self.weights[layer].items()}
            qkv = self._product("qkv", _norm(hidden, w["input_norm"]), w, layer)
            hidden = hidden + self._product("o", self._attend(qkv, layer), w, layer)
            both = self._product("gate_up", _norm(hidden, w["post_norm"]), w, layer)
            gate, up = both.chunk(2, -1)
            inner = torch.nn.functional.silu(gate) * up
            hidden = hidden + self._product("down", inner, w, layer)
        return hidden

    def _product(
        self, group: str, x: torch.Tensor, w: dict[str, torch.Tensor], layer: int
    ) -> torch.Tensor:
        out = x @ w[group].T
        for name in GROUPS[group]:
            out = self.adapters[name].add(out, x, self.slots, layer)
        return out

    def _attend(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        heads, kv_heads, dim = self.sizes[2:]
        q, k, v = qkv.view(len(qkv), -1, dim).split([heads, kv_heads, kv_heads], dim=1)
        out = []
        for row, kv_len in enumerate(self.kv_lens.tolist()):
            before = torch.arange(kv_len - 1, device=qkv.device)
            pages = self.pages[row, before // PAGE_SIZE].long()
            # [kv_len - 1, Hkv, D] each.
            known = self.pool[pages, :, layer, :, before % PAGE_SIZE].to(qkv.dtype).unbind(2)
            own = (self._rotated(k[row], kv_len - 1), v[row])
            keys, values = (
                torch.cat([old, new[None]]).repeat_interleave(heads // kv_heads, dim=1)
                for old, new in zip(known, own, strict=True)
            )
            scores = torch.einsum("hd,phd->hp", self._rotated(q[row], kv_len - 1), keys)
            shares = torch.softmax(scores.double() * dim**-0.5, dim=-1).to(qkv.dtype)
            out.append(torch.einsum("hp,phd->hd", shares, values).flatten())
        return torch.stack(out)

    def _rotated(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotates [heads, D] for a position."""
        cos, sin = self.cos_sin[position].to(x.dtype).chunk(2)
        low, high = x.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def make_layers(
    sizes: Sizes, rows: int, ranks: list[int], dtype: torch.dtype, device: str
) -> LayersCase:
    """Rows with random adapters, by slot of these ranks, and random contexts."""
    weights = [_draw_layer(sizes, dtype, device) for _ in range(LAYERS)]
    _, _, heads, kv_heads, dim = sizes
    spec = AttentionSpec(heads, kv_heads, dim, dim**-0.5)
    cos_sin = make_cos_sin(dim, MAX_CONTEXT).to(device)
    layers = [
        Layer(
            index,
            Norm(w["input_norm"], EPS),
            Attention(spec, index, cos_sin, qkv_proj=_plain(w["qkv"]), o_proj=_plain(w["o"])),
            Norm(w["post_norm"], EPS),
            GatedMLP(index, _plain(w["gate_up"], gated=True), _plain(w["down"])),
        )
        for index, w in enumerate(weights)
    ]
    adapters = {}
    for name, (k, n, column) in sizes.projections.items():
        turned = ranks[:1] + random.sample(ranks[1:], len(ranks) - 1)
        adapters[name] = make_lora(k, n, turned, dtype, column=column, layers=LAYERS).to(device)
    slots = draw_slots(rows, len(ranks))
    host = sort_tokens(np.array(slots, np.int32), len(ranks))
    lora = LoraStep(
        segments=LoraSegments(*(torch.from_numpy(array).to(device) for array in host)),
        are_given=True,
        **{
            group: tuple(adapters[name].weights for name in names)  # type: ignore[arg-type]
            for group, names in GROUPS.items()
        },
    )
    each = -(-MAX_CONTEXT // PAGE_SIZE)
    shape = (rows * each, sizes.kv_heads, LAYERS, 2, PAGE_SIZE, sizes.dim)
    return LayersCase(
        sizes=sizes,
        run=Run(layers),
        weights=weights,
        adapters=adapters,
        slots=slots,
        lora=lora,
        hidden=torch.randn(rows, sizes.hidden, device=device).to(dtype),
        pool=torch.randn(shape, device=device).to(dtype),
        kv_lens=torch.randint(1, MAX_CONTEXT + 1, (rows,), dtype=torch.int32, device=device),
        pages=torch.randperm(rows * each, device=device).int().view(rows, each),
        cos_sin=cos_sin,
    )


def _draw_layer(sizes: Sizes, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    def draw(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, device=device) / columns**0.5).to(dtype)

    drawn = {
        group: torch.cat([draw(*sizes.projections[name][1::-1]) for name in names])
        for group, names in GROUPS.items()
    }
    for name in ("input_norm", "post_norm"):
        drawn[name] = (1 + torch.randn(sizes.hidden, device=device) / 8).to(dtype)
    return drawn


def _plain(weight: torch.Tensor, *, gated: bool = False) -> LinearWeight:
    """The weights in the form used on a GPU, whatever the machine's own operations would use."""
    return LinearWeight(*weight.shape, weight.dtype, gated, PlainForm(weight), None)
