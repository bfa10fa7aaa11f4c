"""Attention over the paged pool, with its projections."""

from __future__ import annotations

from dataclasses import replace

import torch
from weft.engine.checkpoint.config import ModelConfig
from weft.engine.model.layers.heads import HeadChange
from weft.engine.model.layers.layer import Query, shape_of
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.kernels.attention import AttentionSpec, own_kv, paged_attention, settled
from weft.kernels.linear import LinearWeight
from weft.kernels.lora import LoraStep, addition_to
from weft.kernels.norm import Norm
from weft.kernels.rope import check_rope, rope_and_cache
from weft.kernels.stream import Normed, Sum, can_fold


def qkv_spec(
    in_features: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    fused: str | None = None,
    has_gate: bool = False,
) -> LinearSpec:
    """The projections of q, k and v of all heads; `has_gate`: each head's q is followed by a gate
    of its result.
    """
    of_q = (2 if has_gate else 1) * num_heads * head_dim
    return LinearSpec(
        names=("q_proj", "k_proj", "v_proj"),
        in_features=in_features,
        rows=(of_q, num_kv_heads * head_dim, num_kv_heads * head_dim),
        split="out",
        unit=head_dim,
        bias=bias,
        fused=fused,
    )


def o_spec(
    hidden: int, num_heads: int, head_dim: int, *, bias: bool = False, name: str = "o_proj"
) -> LinearSpec:
    """The projection of all heads back to the hidden size."""
    return LinearSpec(
        names=(name,),
        in_features=num_heads * head_dim,
        rows=(hidden,),
        split="in",
        unit=head_dim,
        bias=bias,
    )


def attention_spec(config: ModelConfig, layer: int) -> AttentionSpec:
    """The usual constants of a layer's attention."""
    heads, dim = (config.num_heads, config.num_kv_heads), config.head_dim
    return AttentionSpec(*heads, dim, dim**-0.5, config.window_of(layer))


class Attention:
    """Grouped-query attention of one layer with rotary positions: a `Mixer`."""

    def __init__(
        self,
        spec: AttentionSpec,
        layer: int,
        cos_sin: torch.Tensor,
        *,
        qkv_proj: LinearWeight,
        o_proj: LinearWeight,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        num_adjacent: int = 0,
        change: HeadChange | None = None,
        q_scales: torch.Tensor | None = None,
        has_gate: bool = False,
    ) -> None:
        """Assembles the layer from its parts.

        Args:
            spec: The layer's constants, from `attention_spec`.
            layer: The layer's number, and its index in the pool unless `move` follows.
            cos_sin: [max_positions, head_dim] float32, shared by layers that rotate alike; of one
                row: heads are not rotated.
            qkv_proj: [hidden] -> q, k and v of all heads.
            o_proj: All heads -> [hidden].
            q_norm: Norm of each head of q before the rotation, or None.
            k_norm: The same for k; both have one epsilon.
            num_adjacent: See `rope_and_cache`.
            change: Another change of q and k before the rotation, or None.
            q_scales: [max_positions] float32: factors on q by its position, or None.
            has_gate: Whether `qkv_proj` has a gate of each head's result behind its q.
        """
        self.layer = self.in_pool = layer
        self.group = 0
        """Number of the step's page group that holds the layer's K and V, as layer `in_pool`."""
        self.cos_sin = cos_sin
        self.num_adjacent = num_adjacent
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.change = change
        self.q_scales = q_scales
        self.has_gate = has_gate
        # With several ranks, the share of the heads of this rank.
        heads = o_proj.in_features // spec.dim
        of_q = 2 * heads if has_gate else heads
        kv_heads = (qkv_proj.out_features // spec.dim - of_q) // 2
        self.spec = spec._replace(heads=heads, kv_heads=kv_heads, is_fixed=qkv_proj.is_fixed)

    @property
    def is_usual(self) -> bool:
        """Whether `DenseRun` supports all operations of this layer on heads."""
        has_extras = self.change is not None or self.q_scales is not None or self.has_gate
        has_extras = has_extras or self.spec.first_position > 0
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        are_typed = all(norm.weight.dtype == self.qkv_proj.dtype for norm in norms)
        return self._is_rotated and not self.num_adjacent and not has_extras and are_typed

    @property
    def _is_rotated(self) -> bool:
        return self.cos_sin.shape[0] > 1

    def move(self, group: int, in_pool: int) -> None:
        """See `Mixer.move`."""
        self.group, self.in_pool = group, in_pool

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        """See `Mixer.prepare`: on a GPU the layer's page group is settled."""
        group = step.groups[self.group]
        pool = group.pool_of(pool)
        if not pool.is_cuda or group.is_settled:
            return step
        spec, dtype = self.spec, self.qkv_proj.dtype
        heads = (spec.heads, spec.kv_heads)
        shape = (rows, (spec.heads + 2 * spec.kv_heads) * spec.dim)
        check_rope(shape, dtype, step.positions, self.cos_sin, pool, group.places, heads)
        groups = list(step.groups)
        groups[self.group] = settled(group, spec, rows, dtype, pool)
        return replace(step, groups=tuple(groups))

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Writes K and V of all rows."""
        group, spec = step.groups[self.group], self.spec
        qkv, gate = x.linear(self.qkv_proj, addition_to(step.lora, "qkv", self.layer)), None
        if self.has_gate:
            qkv, gate = self._apart(qkv)
        positions = step.positions
        if self.change is not None:
            qkv = self.change(qkv, positions, spec.heads * spec.dim)
        is_settled = group.is_settled
        if not self._is_rotated:
            # These were just created, so kernels must not read them early.
            positions, is_settled = torch.zeros_like(positions), False
        own, norm = own_kv(qkv, spec, group), self.q_norm or self.k_norm
        q = rope_and_cache(
            qkv,
            positions,
            self.cos_sin,
            group.pool_of(pool),
            self.in_pool,
            group.places,
            spec.heads,
            spec.kv_heads,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            1e-6 if norm is None else norm.eps,
            None if own is None else own.k,
            num_adjacent=self.num_adjacent,
            is_settled=is_settled,
        )
        if self.q_scales is not None:
            q = (q * self.q_scales[step.positions][:, None, None]).to(q.dtype)
        return Query(q, own, gate)

    def _apart(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [T, (Hq + 2 * Hkv) * D], and gates, [T, Hq * D]."""
        spec = self.spec
        of_q = 2 * spec.heads * spec.dim
        both = torch.unflatten(projected[:, :of_q], 1, (spec.heads, 2, spec.dim))
        q, gate = (part.flatten(1) for part in both.unbind(2))
        return torch.cat((q, projected[:, of_q:]), dim=1), gate

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        """Attends to the requests' pages and projects the result."""
        group = step.groups[self.group]
        mixed = paged_attention(
            query.q, group.pool_of(pool), self.in_pool, self.spec, group, query.own
        )
        if query.gate is not None:
            mixed = mixed * query.gate.sigmoid()
        return Sum(mixed, self.o_proj, addition_to(step.lora, "o", self.layer))

    def folds(self, rows: int, lora: LoraStep | None) -> bool:
        """See `Mixer.folds`."""
        to_qkv, to_o = (addition_to(lora, group, self.layer) for group in ("qkv", "o"))
        return can_fold(rows, self.qkv_proj, to_qkv, self.o_proj, to_o)

    def shape_key(self) -> object:
        """See `Mixer.shape_key`."""
        products = shape_of(self.qkv_proj), shape_of(self.o_proj)
        return Attention, products, id(self.cos_sin), self.is_usual, self.spec.scale
