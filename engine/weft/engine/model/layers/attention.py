"""Attention over the paged pool, with its projections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from weft.checkpoint.config import ModelConfig
from weft.engine.model.layers.heads import HeadChange
from weft.engine.model.layers.layer import Query, shape_of
from weft.engine.model.step import Step
from weft.engine.model.weights.specs import LinearSpec
from weft.kernels.ops import divided_pages
from weft.kernels.ops.attention import can_settle, own_kv, paged_attention, settled
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.rope import check_rope, rope_and_cache
from weft.kernels.ops.stream import can_fold
from weft.kernels.ops.stream.additions import Normed, Sum


def qkv_spec(
    in_features: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    bias: bool = False,
    fused: str | None = None,
    value_dim: int | None = None,
    v_name: str = "v_proj",
    has_gate: bool = False,
    groups: int = 1,
    order: tuple[int, ...] = (),
) -> LinearSpec:
    """The projections of q, k and v of all heads.

    Args:
        value_dim: Width of a head of V; None: `head_dim`.
        has_gate: Whether each head's q is followed by a gate of its result.
        groups: Parts of the fused rows, as in `LinearSpec`.
        order: Order of the projections in the fused rows, as in `LinearSpec`.
    """
    widths = ((2 if has_gate else 1) * head_dim, head_dim, value_dim or head_dim)
    counts = (num_heads, num_kv_heads, num_kv_heads)
    return LinearSpec(
        names=("q_proj", "k_proj", v_name),
        in_features=in_features,
        rows=tuple(count * width for count, width in zip(counts, widths, strict=True)),
        split="out",
        # Models whose V is narrower are not divided among ranks.
        unit=math.gcd(head_dim, widths[2]),
        bias=bias,
        fused=fused,
        groups=groups,
        order=order,
    )


def o_spec(
    hidden: int, num_heads: int, head_dim: int, *, bias: bool = False, name: str = "o_proj"
) -> LinearSpec:
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


class Gate(NamedTuple):
    """A factor on attention's result, from a projection of the layer's input."""

    proj: LinearWeight | None = None
    """[hidden] -> one factor per head, or one per element of the heads' values. None: in `qkv_proj`
    the gates of each head follow its q.
    """
    activation: Literal["sigmoid", "softplus"] = "sigmoid"

    def of(self, mixed: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        """[T, Hq * D] times the factors. `found` has the factors before the activation: one per
        head, or [T, Hq, D].
        """
        # Computed in float32 and rounded, by one launch on a GPU.
        act = torch.sigmoid if self.activation == "sigmoid" else F.softplus
        factors = act(found).flatten(1)
        heads = mixed.view(mixed.shape[0], factors.shape[1], -1)
        return (heads * factors.unsqueeze(2)).flatten(1)


def plane_of(
    group: AttentionMetadata, pool: torch.Tensor, plane: PlaneInPage | None
) -> torch.Tensor:
    whole = group.pool_of(pool)
    return whole if plane is None else plane.of(whole)


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
        changes: Sequence[HeadChange] = (),
        q_scales: torch.Tensor | None = None,
        value_dim: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Assembles the layer from its parts.

        Args:
            layer: The layer's number, and its index in the pool unless `move` follows.
            cos_sin: [max_positions, head_dim] float32, shared by layers that rotate alike. With one
                row heads are not rotated.
            qkv_proj: [hidden] -> q, k and v of all heads.
            o_proj: All heads -> [hidden].
            q_norm: Norm of each head of q before the rotation, or None.
            k_norm: Norm of each head of k before the rotation, or None; both norms have one
                epsilon.
            num_adjacent: Pairs of adjacent elements that are rotated, as in `rope_and_cache`.
            changes: Other changes of q, k and v before the rotation, in their order.
            q_scales: [max_positions] float32: factors on q by its position, or None.
            value_dim: Elements of a head of V in `qkv_proj` and `o_proj`, if fewer than D; the
                changes widen it to D.
            gate: Factor on attention's result, or None.
        """
        self.layer = self.in_pool = layer
        self.group = 0
        """Number of the step's page group that holds the layer's K and V, there as layer `in_pool`.
        """
        self.cos_sin = cos_sin
        self.num_adjacent = num_adjacent
        self.qkv_proj = qkv_proj
        self.o_proj = o_proj
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.changes = tuple(changes)
        self.q_scales = q_scales
        self.value_dim, self.gate = value_dim or spec.dim, gate
        self._has_gate_in_q = gate is not None and gate.proj is None
        self._plane: PlaneInPage | None = None
        # With several ranks these are this rank's heads.
        heads = o_proj.in_features // self.value_dim
        of_q = (2 if self._has_gate_in_q else 1) * heads * spec.dim
        kv_heads = (qkv_proj.out_features - of_q) // (spec.dim + self.value_dim)
        self.spec = spec._replace(heads=heads, kv_heads=kv_heads, is_fixed=qkv_proj.is_fixed)

    @property
    def is_usual(self) -> bool:
        """Whether `DenseRun` supports all operations of this layer on heads."""
        has_extras = bool(self.changes) or self.q_scales is not None or self.gate is not None
        has_extras |= self._plane is not None or self.spec.first_position > 0
        norms = [norm for norm in (self.q_norm, self.k_norm) if norm is not None]
        are_typed = all(norm.weight.dtype == self.qkv_proj.dtype for norm in norms)
        return self._is_rotated and not self.num_adjacent and not has_extras and are_typed

    @property
    def _is_rotated(self) -> bool:
        return self.cos_sin.shape[0] > 1

    @property
    def has_own_kv(self) -> bool:
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        self.group, self.in_pool, self._plane = group, in_pool, plane

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        group = step.groups[self.group]
        pool = plane_of(group, pool, self._plane)
        if group.here is not None or not can_settle(group, pool):
            return step
        spec, dtype = self.spec, self.qkv_proj.dtype
        heads = (spec.heads, spec.kv_heads)
        shape = (rows, (spec.heads + 2 * spec.kv_heads) * spec.dim)
        check_rope(shape, dtype, step.turn_rows, self._turns(step), pool, group.places, heads)
        groups = list(step.groups)
        groups[self.group] = settled(group, spec, rows, dtype, pool)
        return replace(step, groups=tuple(groups))

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        group, spec = step.groups[self.group], self.spec
        qkv = x.linear(self.qkv_proj, step.added("qkv", self.layer))
        gate = None
        if self._has_gate_in_q:
            qkv, gate = self._apart(qkv)
        elif self.gate is not None and self.gate.proj is not None:
            gate = x.linear(self.gate.proj, None)
        positions = step.turn_rows
        for change in self.changes:
            qkv = change(qkv, positions, spec.heads * spec.dim)
        is_settled = group.is_settled
        if not self._is_rotated:
            # These positions were just created, so kernels must not read them early.
            positions, is_settled = torch.zeros_like(positions), False
        own, norm = own_kv(qkv, spec, group), self.q_norm or self.k_norm
        q = rope_and_cache(
            qkv,
            positions,
            self._turns(step),
            plane_of(group, pool, self._plane),
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

    def _turns(self, step: Step) -> torch.Tensor:
        return self.cos_sin if step.turns is None else step.turns

    def _apart(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries, keys and values, [T, (Hq + 2 * Hkv) * D], and gates, [T, Hq, D]."""
        heads, dim = self.spec.heads, self.spec.dim
        both = torch.unflatten(projected[:, : 2 * heads * dim], 1, (heads, 2, dim))
        others = torch.unflatten(projected[:, 2 * heads * dim :], 1, (-1, dim))
        q, gate = both.unbind(2)
        return torch.cat((q, others), dim=1).flatten(1), gate

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        group, spec = step.groups[self.group], self.spec
        plane = plane_of(group, pool, self._plane)
        if group.here is None:
            mixed = paged_attention(query.q, plane, self.in_pool, spec, group, query.own)
        else:
            mixed = divided_pages.attention(query.q, plane, self.in_pool, spec, group.here)
        if self.value_dim < spec.dim:
            mixed = mixed.view(-1, spec.heads, spec.dim)[..., : self.value_dim].flatten(1)
        if self.gate is not None and query.gate is not None:
            mixed = self.gate.of(mixed, query.gate)
        return Sum(mixed, self.o_proj, step.added("o", self.layer))

    def folds(self, rows: int, step: Step) -> bool:
        to_qkv, to_o = (step.added(group, self.layer) for group in ("qkv", "o"))
        return can_fold(rows, self.qkv_proj, to_qkv, self.o_proj, to_o)

    def shape_key(self) -> object:
        products = shape_of(self.qkv_proj), shape_of(self.o_proj)
        own = id(self.cos_sin), self.is_usual, self.spec.scale, self.spec.is_chunked, self._plane
        return Attention, products, own
