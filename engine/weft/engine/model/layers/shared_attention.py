"""Attention of a layer to the K and V of an earlier layer."""

from __future__ import annotations

import torch
from weft.engine.model.layers.attention import plane_of
from weft.engine.model.layers.layer import Query, shape_of
from weft.engine.model.layers.rotary import Rotary
from weft.engine.model.step import Step
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.rope.reference import rotated
from weft.kernels.ops.stream.additions import Normed, Sum


class SharedAttention:
    """Grouped-query attention with queries alone, to K and V that an earlier layer has stored: a
    `Mixer`.

    Cross-layer sharing of K and V: Brandon et al., arXiv 2405.12981. Gemma 3n and 4 share those of
    the last layer of the same kind.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        layer: int,
        rotary: Rotary,
        *,
        q_proj: LinearWeight,
        q_norm: Norm | None,
        o_proj: LinearWeight,
    ) -> None:
        """`move` must name the place of the earlier layer afterwards."""
        self.spec, self.layer, self.rotary = spec, layer, rotary
        self.q_proj, self.q_norm, self.o_proj = q_proj, q_norm, o_proj
        self.group = self.in_pool = 0
        self._plane: PlaneInPage | None = None

    @property
    def has_own_kv(self) -> bool:
        return False

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        self.group, self.in_pool, self._plane = group, in_pool, plane

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        return step

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        """Returns the queries and stores nothing."""
        heads, dim = self.spec.heads, self.spec.dim
        added = step.added("qkv", self.layer)
        to_q = None if added is None else added.before(self.q_proj.out_features)
        q = x.linear(self.q_proj, to_q).view(-1, heads, dim)
        if self.q_norm is not None:
            q = self.q_norm(q.reshape(-1, dim)).view(-1, heads, dim)
        turns = self.rotary.cos_sin[step.positions]
        return Query(rotated(q, turns, self.rotary.num_adjacent))

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        group = step.groups[self.group]._replace(is_settled=False)
        plane = plane_of(group, pool, self._plane)
        mixed = paged_attention(query.q, plane, self.in_pool, self.spec, group)
        return Sum(mixed, self.o_proj, step.added("o", self.layer))

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return SharedAttention, shape_of(self.q_proj), shape_of(self.o_proj)
