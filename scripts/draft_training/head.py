"""An EAGLE-3 head (arXiv:2503.01840) and its unrolled forward of training-time test (section 3).

Entry p of the draft is made from (g_{p-1}, t_p): the target's state one position before, and the
token at p. Position 0 has none. Everything here has the positions 1, 2, ... of a text as its
columns, so column c is position c + 1.

In step 0 all columns go through the head with the target's states, as after a prompt. In step s
the query of position p stands for the s-th token drafted from position p - s: its state is what
step s - 1 put out at p - 1, and it attends to entries of target states up to p - s and to the s
entries of its own chain after them. The tokens of a chain are those of the text; where the draft
would have chosen others the chain would have ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .target import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head, under their names in config.json."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    draft_vocab_size: int

    @classmethod
    def of(cls, config: Any, draft_vocab_size: int) -> HeadShape:
        """The shape of a head for a target with transformers' `config`."""
        heads = config.num_attention_heads
        return cls(
            hidden_size=config.hidden_size,
            target_hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=config.rms_norm_eps,
            vocab_size=config.vocab_size,
            draft_vocab_size=draft_vocab_size,
        )

    def fields(self) -> dict[str, int | float]:
        """For config.json."""
        return asdict(self)


def linear(columns: int, rows: int) -> nn.Linear:
    """Without bias, as everywhere in a head."""
    return nn.Linear(columns, rows, bias=False)


class Attention(nn.Module):
    """Projections of the head's one layer; names as published."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        width = 2 * shape.hidden_size
        self.dim = shape.head_dim
        self.q_proj = linear(width, shape.num_attention_heads * shape.head_dim)
        self.k_proj = linear(width, shape.num_key_value_heads * shape.head_dim)
        self.v_proj = linear(width, shape.num_key_value_heads * shape.head_dim)
        self.o_proj = linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size)

    def heads(self, projected: torch.Tensor) -> torch.Tensor:
        """[rows, columns, heads * dim] to [rows, heads, columns, dim]."""
        return projected.view(*projected.shape[:-1], -1, self.dim).transpose(1, 2)


class MLP(nn.Module):
    """Gated, with SiLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Midlayer(nn.Module):
    """The head's one layer; its first half takes the token and the state side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = MLP(shape)


class DraftHead(nn.Module):
    """A head whose state dict is the published layout, without embedding and LM head.

    Args:
        shape: Of the head.
        token_ids: int64 [draft_vocab], rising: the target's id of each draft id.
        embedding: The target's, [vocab, hidden]; frozen.
        lm_head: The target's, [vocab, hidden]; its rows at `token_ids` are used, frozen.
    """

    d2t: torch.Tensor
    t2d: torch.Tensor
    embedding: torch.Tensor
    lm_head: torch.Tensor

    def __init__(
        self,
        shape: HeadShape,
        token_ids: torch.Tensor,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.fc = linear(3 * shape.target_hidden_size, shape.hidden_size)
        self.midlayer = Midlayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        draft_ids = torch.arange(shape.draft_vocab_size, device=token_ids.device)
        is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool, device=token_ids.device)
        is_drafted[token_ids] = True
        self.register_buffer("d2t", token_ids - draft_ids)
        self.register_buffer("t2d", is_drafted)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("lm_head", lm_head[token_ids].clone(), persistent=False)

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [draft_vocab]: the target's id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def initialise(self, generator: torch.Generator) -> None:
        """Random weights; the state starts as the last of the three, plus a little noise."""
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim == 2:
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(0.02 * noise)
            if self.shape.target_hidden_size == self.shape.hidden_size:
                self.fc.weight[:, -self.shape.hidden_size :] += torch.eye(self.shape.hidden_size)

    def unroll(
        self, aux: torch.Tensor, ids: torch.Tensor, rope: Rope, num_steps: int
    ) -> Iterator[torch.Tensor]:
        """The head's states of step 0, 1, ... at positions 1 and up.

        Args:
            aux: [rows, tokens, 3 * hidden] of the target.
            ids: int64 [rows, tokens].
            rope: Of positions 1 to tokens - 1.
            num_steps: Steps.

        Yields:
            [rows, tokens - 1, hidden]: x of each step, which `logits` takes. In step s the first s
            columns mean nothing.
        """
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        state = self.first_step(aux, ids, rope, keys, values)
        yield state
        embedded = self._embedded(ids, state.dtype)
        for _ in range(num_steps - 1):
            state = functional.pad(state, (0, 0, 1, 0))[:, :-1]
            state = self._step(state, embedded, rope, keys, values)
            yield state

    def first_step(
        self,
        aux: torch.Tensor,
        ids: torch.Tensor,
        rope: Rope,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        """Step 0 of `unroll`; adds its K and V, [rows, kv_heads, tokens - 1, dim]."""
        # Under autocast the sum of states stays in float32.
        state = self.fc(aux[:, :-1]).to(self.norm.weight.dtype)
        return self._step(state, self._embedded(ids, state.dtype), rope, keys, values)

    def _embedded(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Of the tokens from position 1 on, normalised."""
        embedded = functional.embedding(ids[:, 1:], self.embedding).to(dtype)
        out: torch.Tensor = self.midlayer.input_layernorm(embedded)
        return out

    def _step(
        self,
        state: torch.Tensor,
        embedded: torch.Tensor,
        rope: Rope,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
    ) -> torch.Tensor:
        layer = self.midlayer
        both = torch.cat([embedded, layer.hidden_norm(state).to(embedded.dtype)], dim=-1)
        attn = layer.self_attn
        query = rotate(attn.heads(attn.q_proj(both)), rope)
        keys.append(rotate(attn.heads(attn.k_proj(both)), rope))
        values.append(attn.heads(attn.v_proj(both)))
        mixed = attend(query, keys, values).transpose(1, 2).flatten(2)
        state = state + attn.o_proj(mixed)
        out: torch.Tensor = state + layer.mlp(layer.post_attention_layernorm(state))
        return out

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary of states [..., hidden]."""
        return functional.linear(self.norm(state).to(self.lm_head.dtype), self.lm_head)


def rotate(heads: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotary embedding that pairs dimension i with i + dim / 2."""
    cos, sin = rope
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).to(heads.dtype)


def attend(
    query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> torch.Tensor:
    """Attention of step s = len(keys) - 1; see the head of this file.

    Args:
        query: [rows, heads, columns, dim].
        keys, values: Of each step so far, [rows, kv_heads, columns, dim].

    Returns:
        [rows, heads, columns, dim].
    """
    step = len(keys) - 1
    if step == 0:
        return functional.scaled_dot_product_attention(
            query, keys[0], values[0], is_causal=True, enable_gqa=True
        )
    rows, kv_heads, num_columns, dim = keys[0].shape
    grouped = query.view(rows, kv_heads, -1, num_columns, dim) * dim**-0.5
    scores = torch.matmul(grouped, keys[0][:, :, None].transpose(-1, -2))
    is_seen = torch.ones(num_columns, num_columns, dtype=torch.bool, device=query.device)
    scores = scores.masked_fill(~is_seen.tril(-step), float("-inf"))
    chain = range(1, step + 1)
    own = [(grouped * _delayed(keys[j], step - j)).sum(-1, keepdim=True) for j in chain]
    weights = torch.cat([scores, *own], dim=-1).softmax(-1, dtype=torch.float32)
    weights = weights.to(values[0].dtype)
    out = torch.matmul(weights[..., :num_columns], values[0][:, :, None])
    for j in chain:
        column = num_columns + j - 1
        out = out + weights[..., column : column + 1] * _delayed(values[j], step - j)
    return out.flatten(1, 2)


def _delayed(entries: torch.Tensor, by: int) -> torch.Tensor:
    """Entries [rows, kv_heads, columns, dim] of `by` columns before, with a dimension for groups.

    The first `by` columns have none: zeros, in columns that mean nothing.
    """
    return functional.pad(entries, (0, 0, by, 0))[:, :, None, : entries.shape[2]]
