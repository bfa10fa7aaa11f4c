"""A small Qwen3.5 with its MTP head, to be trained: names and layout of published checkpoints."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .delta import gated_delta_rule, short_conv, unit

Rope = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes, named as in Qwen3.5's config.json."""

    vocab_size: int = 3072
    hidden_size: int = 320
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    linear_num_key_heads: int = 4
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that are rotated."""
        return self.head_dim // 4

    def is_full(self, layer: int) -> bool:
        """Whether a layer has attention over all tokens."""
        return (layer + 1) % self.full_attention_interval == 0

    def config(self) -> dict[str, Any]:
        """Fields of config.json, of the model's form alone."""
        kinds = ("linear_attention", "full_attention")
        layers = [kinds[self.is_full(layer)] for layer in range(self.num_hidden_layers)]
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            **asdict(self),
            "layer_types": layers,
            "attention_bias": False,
            "attn_output_gate": True,
            "hidden_act": "silu",
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
            },
            "tie_word_embeddings": True,
        }


class Norm(nn.Module):
    """RMS norm that multiplies by 1 plus its weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight)).type_as(x)


class GatedNorm(nn.Module):
    """RMS norm of each head's result, times SiLU of its gate."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * self.weight * functional.silu(gate.float())).type_as(gate)


class LinearAttention(nn.Module):
    """A gated delta net."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads, hidden = shape.linear_num_value_heads, shape.hidden_size
        self.keys = shape.linear_num_key_heads * shape.linear_key_head_dim
        self.values = heads * shape.linear_value_head_dim
        channels = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = nn.Module()
        taps = torch.empty(channels, 1, shape.linear_conv_kernel_dim)
        self.conv1d.weight = nn.Parameter(nn.init.uniform_(taps, -0.5, 0.5))
        # As Mamba2 begins: time steps between 0.001 and 0.1.
        step = torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)).exp()
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.norm = GatedNorm(shape.linear_value_head_dim, shape.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        shape = self.shape
        mixed = short_conv(self.in_proj_qkv(x), self.conv1d.weight)
        q, k, v = mixed.split([self.keys, self.keys, self.values], dim=-1)
        q, k = (unit(part.unflatten(-1, (-1, shape.linear_key_head_dim))) for part in (q, k))
        v = v.unflatten(-1, (-1, shape.linear_value_head_dim)).float()
        shared = shape.linear_num_value_heads // shape.linear_num_key_heads
        q, k = (part.repeat_interleave(shared, dim=2) for part in (q, k))
        rate = functional.softplus(self.in_proj_a(x).float() + self.dt_bias)
        log_decay = -self.A_log.exp() * rate
        beta = self.in_proj_b(x).float().sigmoid()
        with torch.autocast(x.device.type, enabled=False):
            scale = shape.linear_key_head_dim**-0.5
            mixed = gated_delta_rule(q * scale, k, v, log_decay, beta)
        gate = self.in_proj_z(x).unflatten(-1, (-1, shape.linear_value_head_dim))
        return self.out_proj(self.norm(mixed, gate).flatten(2))


class Attention(nn.Module):
    """Attention with an output gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        hidden, dim = shape.hidden_size, shape.head_dim
        heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(hidden, 2 * heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)
        self.q_norm = Norm(dim, shape.rms_norm_eps)
        self.k_norm = Norm(dim, shape.rms_norm_eps)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        dim = self.shape.head_dim
        both = self.q_proj(x).unflatten(-1, (self.shape.num_attention_heads, 2 * dim))
        q, gate = both.chunk(2, dim=-1)
        k, v = (part.unflatten(-1, (-1, dim)) for part in (self.k_proj(x), self.v_proj(x)))
        q, k = rotate(self.q_norm(q), rope), rotate(self.k_norm(k), rope)
        q, k, v = (part.transpose(1, 2) for part in (q, k.type_as(v), v))
        found = functional.scaled_dot_product_attention(
            q.type_as(v), k, v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(found.transpose(1, 2).flatten(2) * gate.flatten(2).sigmoid())


class MLP(nn.Module):
    """A SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, shape: Shape, *, is_full: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.is_full = is_full
        if is_full:
            self.self_attn = Attention(shape)
        else:
            self.linear_attn = LinearAttention(shape)
        self.mlp = MLP(shape)

    def forward(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        mixer = self.self_attn if self.is_full else self.linear_attn
        x = x + mixer(self.input_layernorm(x), rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(
            Layer(shape, is_full=shape.is_full(layer)) for layer in range(shape.num_hidden_layers)
        )
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, ids: torch.Tensor, rope: Rope) -> torch.Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, rope)
        return self.norm(x)


class MtpHead(nn.Module):
    """One more layer, over the token of a position and the state at the position before."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.pre_fc_norm_embedding = Norm(hidden, eps)
        self.pre_fc_norm_hidden = Norm(hidden, eps)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, is_full=True)])
        self.norm = Norm(hidden, eps)

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, rope: Rope) -> torch.Tensor:
        both = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(states)]
        x = self.fc(torch.cat(both, dim=-1))
        return self.norm(self.layers[0](x, rope))


class HybridLM(nn.Module):
    """The model and its head; the embedding is the LM head of both.

    Args:
        shape: Sizes.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.mtp = MtpHead(shape)
        layers = shape.num_hidden_layers
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                ends = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if ends else 0.02)

    def forward(self, ids: torch.Tensor, chain: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """States of all positions, [B, T, hidden], and of the head's steps 1 to `chain`, of which
        step s has those of positions s to T - 1. The state at t tells of token t + 1. T is a
        multiple of `delta.CHUNK`.

        A further step takes the states of the step before at all positions. When drafting,
        attention reads the model's own entries for positions before the chain.
        """
        cos, sin = rotations(self.shape, ids)
        states = self.model(ids, (cos, sin))
        embedded = self.model.embed_tokens(ids)
        found: list[torch.Tensor] = []
        before = states
        for step in range(1, chain + 1):
            before = self.mtp(embedded[:, step:], before[:, :-1], (cos[step:], sin[step:]))
            found.append(before)
        return states, found


def rotations(shape: Shape, ids: torch.Tensor) -> Rope:
    """Cosines and sines [T, 1, rotary_dim] of rotary positions."""
    dim = shape.rotary_dim
    rates = 10000.0 ** -(torch.arange(0, dim, 2, device=ids.device).float() / dim)
    angles = torch.arange(ids.shape[1], device=ids.device).float()[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates the first elements of heads [B, T, H, D]; halves are pairs."""
    cos, sin = rope
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned.type_as(x), rest], dim=-1)
