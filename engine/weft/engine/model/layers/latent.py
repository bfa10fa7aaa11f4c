"""Multi-head latent attention (DeepSeek-AI 2024) over the paged pool, with its projections."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.latent_config import LatentConfig
from weft.checkpoint.parts import AttentionConfig
from weft.contract.errors import ModelError
from weft.contract.layout import CacheLayout, PagedPlane
from weft.engine.model.layers.attention import Gate, o_spec, plane_of
from weft.engine.model.layers.layer import Query, shape_of
from weft.engine.model.layers.rotary import Rotary
from weft.engine.model.step import Step
from weft.engine.model.weights.computed_format import dtype_name
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.kernels.ops import divided_pages
from weft.kernels.ops.attention.spec import AttentionMetadata
from weft.kernels.ops.latent_attention import (
    attention_before,
    earlier_attention,
    is_faster_uncompressed,
    latent_attention,
    merged,
    own_attention,
    planned,
    read_latents,
    write_latents,
)
from weft.kernels.ops.latent_attention.spec import EarlierLatents, LatentSpec
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.rope.reference import rotated
from weft.kernels.ops.stream.additions import Normed, Sum

_EPS = 1e-6
"""Epsilon of the norms of latents. The configuration's epsilon does not apply to them."""


class _Absorbed(NamedTuple):
    """The projection of latents to keys and values of all heads, as two matrices per head."""

    to_keys: torch.Tensor
    """[H, nope, rank]."""
    to_values: torch.Tensor
    """[H, rank, value]."""


class LatentAttention:
    """Attention of one layer to one latent per position: a `Mixer`.

    The projection of latents to keys is multiplied into the queries, so that the layer need not
    compute the heads' keys and values. It computes them for prompts of many rows, where that is
    less work.
    """

    def __init__(
        self,
        config: LatentConfig,
        layer: int,
        rotary: Rotary,
        scale: float,
        *,
        first_position: int = 0,
        down_proj: LinearWeight,
        q_norm: Norm | None,
        q_proj: LinearWeight | None,
        kv_norm: Norm,
        absorbed: tuple[torch.Tensor, torch.Tensor],
        o_proj: LinearWeight,
        q_scales: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> None:
        """Assembles the layer from its parts.

        Args:
            layer: The layer's number, and its index in the pool unless `move` follows.
            rotary: Rotation of `rope_dim` elements.
            first_position: First position to which rows attend.
            down_proj: [hidden] -> the queries' latent, or all queries, followed by latent and
                shared key.
            q_norm: Norm of the queries' latent, or None.
            q_proj: The queries' latent -> all queries; None: queries have no latent.
            absorbed: Matrices from latents to keys, [H, nope, rank], and to values, [H, rank,
                value].
            o_proj: Values of all heads -> [hidden].
            q_scales: [max_positions] float32: factor on q by its position, or None.
            gate: Factor on attention's result, or None.
        """
        self.config = config
        self.layer = self.in_pool = layer
        self.group = 0
        """Number of the step's page group that holds the latents, there as layer `in_pool`."""
        self._plane: PlaneInPage | None = None
        self.rotary = rotary
        self.down_proj = down_proj
        self.q_norm = q_norm
        self.q_proj = q_proj
        self.kv_norm = kv_norm
        self.o_proj = o_proj
        self.q_scales, self.gate = q_scales, gate
        self._absorbed = _Absorbed(*absorbed)
        heads = self._absorbed.to_keys.shape[0]
        self.spec = LatentSpec(heads, config.kv_rank, scale, first_position)

    @classmethod
    def read(
        cls,
        config: ModelConfig,
        sizes: LatentConfig,
        attention: AttentionConfig,
        layer: int,
        weights: Weights,
        rotary: Rotary,
        q_scales: torch.Tensor | None = None,
        gate: Gate | None = None,
    ) -> LatentAttention:
        """Reads the parameters below one prefix of the names. Raises ModelError if the gate has no
        separate product.
        """
        if gate is not None and gate.proj is None:
            raise ModelError(f"layer {layer}: a gate of latent attention needs its own product")
        head_dim, of_head = sizes.nope_dim + sizes.rope_dim, sizes.nope_dim + sizes.value_dim
        q_name, q_rows, q_norm, q_proj = "q_proj", config.num_heads * head_dim, None, None
        if sizes.q_rank is not None:
            q_name, q_rows = "q_a_proj", sizes.q_rank
            q_norm = Norm(weights.norm("q_a_layernorm", sizes.q_rank), _EPS)
            q_proj = weights.linear(
                LinearSpec(
                    names=("q_b_proj",),
                    in_features=sizes.q_rank,
                    rows=(config.num_heads * head_dim,),
                    split="out",
                    unit=head_dim,
                )
            )
        down = LinearSpec(
            names=(q_name, "kv_a_proj_with_mqa"),
            in_features=config.hidden_size,
            rows=(q_rows, sizes.kv_rank + sizes.rope_dim),
        )
        up = LinearSpec(
            names=("kv_b_proj",),
            in_features=sizes.kv_rank,
            rows=(config.num_heads * of_head,),
            split="out",
            unit=of_head,
        )
        of_heads = weights.matrix(up).view(-1, of_head, sizes.kv_rank)
        to_keys, to_values = of_heads[:, : sizes.nope_dim], of_heads[:, sizes.nope_dim :]
        return cls(
            sizes,
            layer,
            rotary,
            attention.scale,
            first_position=attention.first_position,
            down_proj=weights.linear(down),
            q_norm=q_norm,
            q_proj=q_proj,
            kv_norm=Norm(weights.norm("kv_a_layernorm", sizes.kv_rank), _EPS),
            absorbed=(to_keys.contiguous(), to_values.transpose(1, 2).contiguous()),
            o_proj=weights.linear(
                o_spec(config.hidden_size, config.num_heads, sizes.value_dim, name=config.names.o)
            ),
            q_scales=q_scales,
            gate=gate,
        )

    @property
    def has_own_kv(self) -> bool:
        return True

    def move(self, group: int, in_pool: int, plane: PlaneInPage | None = None) -> None:
        self.group, self.in_pool, self._plane = group, in_pool, plane

    def prepare(self, step: Step, rows: int, pool: torch.Tensor) -> Step:
        group = step.groups[self.group]
        if group.here is not None:
            plane = plane_of(group, pool, self._plane)
            here = divided_pages.planned(group.here, self.o_proj.dtype, self.spec, plane)
            made = group if here is group.here else group._replace(here=here)
        else:
            made = self._planned(group, self.o_proj.dtype, rows, pool)
        if made is group:
            return step
        groups = list(step.groups)
        groups[self.group] = made
        return replace(step, groups=tuple(groups))

    def write(self, x: Normed, step: Step, pool: torch.Tensor) -> Query:
        sizes, group, heads = self.config, step.groups[self.group], self.spec.heads
        found = x.linear(self.down_proj, None)
        widths = (sizes.kv_rank, sizes.rope_dim)
        low, latent, key = torch.split(found, [found.shape[1] - sum(widths), *widths], dim=1)
        table, adjacent = self.rotary.cos_sin, self.rotary.num_adjacent
        is_rotated = table.shape[0] > 1
        turns = table[step.positions if is_rotated else torch.zeros_like(step.positions)]
        key = rotated(key.unsqueeze(1), turns, adjacent)[:, 0]
        latent = self.kv_norm(latent.contiguous())
        vectors = torch.cat((latent, key), dim=1)
        latents, places = plane_of(group, pool, self._plane), group.places
        write_latents(vectors, latents, self.in_pool, self.spec, places, group.divided)
        if self.q_proj is not None and self.q_norm is not None:
            low = linear(self.q_norm(low.contiguous()), self.q_proj)
        q = low.contiguous().view(len(low), heads, -1)
        turned = q[..., sizes.nope_dim :]
        rotated(turned, turns, adjacent, out=turned)
        if self.q_scales is not None:
            q = (q * self.q_scales[step.positions][:, None, None]).to(q.dtype)
        proj = None if self.gate is None else self.gate.proj
        return Query(q) if proj is None else Query(q, gate=x.linear(proj, None))

    def attend(self, query: Query, step: Step, pool: torch.Tensor) -> Sum:
        group = step.groups[self.group]
        latents, rows, dtype = plane_of(group, pool, self._plane), len(query.q), query.q.dtype
        if group.here is None:
            group = self._planned(group, dtype, rows, pool)
        # Adapters may bring values that are not finite, which would spread to other requests.
        if group.here is not None:
            asked = self._absorb(query.q)
            mixed = divided_pages.latent_attention(
                asked, latents, self.in_pool, self.spec, group.here
            )
            values = self._values(mixed)
        elif step.lora is None and self._takes_heads(dtype, rows, group):
            values = self._by_heads(query.q, group, latents)
        else:
            mixed = latent_attention(self._absorb(query.q), latents, self.in_pool, self.spec, group)
            values = self._values(mixed)
        mixed, lora = values.flatten(1), step.added("o", self.layer)
        if self.gate is not None and query.gate is not None:
            mixed = self.gate.of(mixed, query.gate)
        return Sum(mixed, self.o_proj, lora)

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """[T, H, nope + rope] -> [T, H, rank + rope]: queries of latents."""
        sizes, to_keys = self.config, self._absorbed.to_keys
        own, turned = torch.split(q, [sizes.nope_dim, sizes.rope_dim], dim=2)
        asked = q.new_empty((*q.shape[:2], sizes.kv_rank + sizes.rope_dim))
        into = asked[..., : sizes.kv_rank].transpose(0, 1)
        torch.bmm(own.transpose(0, 1), to_keys, out=into)
        asked[..., sizes.kv_rank :] = turned
        return asked

    def _values(self, mixed: torch.Tensor) -> torch.Tensor:
        """[T, H, rank] -> [T, H, value], contiguous."""
        to_values = self._absorbed.to_values
        values = mixed.new_empty((*mixed.shape[:2], to_values.shape[2]))
        torch.bmm(mixed.transpose(0, 1), to_values, out=values.transpose(0, 1))
        return values

    def _planned(
        self, group: AttentionMetadata, dtype: torch.dtype, rows: int, pool: torch.Tensor
    ) -> AttentionMetadata:
        """`planned`, with the positions before the step only where heads of them are computed."""
        if group.num_earlier and not self._takes_heads(dtype, rows, group):
            group = group._replace(num_earlier=None)
        return planned(group, dtype, self.spec, rows, plane_of(group, pool, self._plane))

    def _takes_heads(self, dtype: torch.dtype, rows: int, group: AttentionMetadata) -> bool:
        if group.max_q_len <= 1 or group.ancestors is not None or self.spec.first_position:
            return False
        dim = self.config.nope_dim + self.config.rope_dim
        is_fixed = self.down_proj.is_fixed
        return not is_fixed and is_faster_uncompressed(dtype, dim, self.config.value_dim, rows)

    def _by_heads(
        self, q: torch.Tensor, group: AttentionMetadata, latents: torch.Tensor
    ) -> torch.Tensor:
        """[T, H, value]: attention to the step's rows by heads, and to earlier positions by latents
        or by heads.
        """
        k, v = self._own_heads(self._vectors(latents, group.places))
        values, sums = own_attention(q, k, v, group.cu_q_lens, self.spec.scale)
        if group.earlier is not None:
            del k, v
            values, sums = self._with_earlier(q, group, group.earlier, latents, values, sums)
        elif not group.is_cold:
            before, sums_before = attention_before(
                self._absorb(q), latents, self.in_pool, self.spec, group
            )
            return merged(values, sums, self._values(before), sums_before)
        # A request of one row may have earlier positions.
        count, rows = group.cu_q_lens.diff(), group.cu_q_lens[1:].long() - 1
        single = group._replace(
            cu_q_lens=torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device),
            kv_lens=torch.where(count == 1, group.kv_lens, 1),
            max_q_len=1,
        )
        before, sums_before = attention_before(
            self._absorb(q.index_select(0, rows)), latents, self.in_pool, self.spec, single
        )
        own = values.index_select(0, rows)
        both = merged(own, sums.index_select(0, rows), self._values(before), sums_before)
        # Padding requests have no rows and name another request's row, to which they add zeros.
        # Adding a difference would round, so rows become zeros first.
        is_single = (count == 1)[:, None, None]
        values.index_add_(0, rows, torch.where(is_single, -own, 0))
        return values.index_add_(0, rows, torch.where(is_single, both, 0))

    def _with_earlier(
        self,
        q: torch.Tensor,
        group: AttentionMetadata,
        earlier: EarlierLatents,
        latents: torch.Tensor,
        values: torch.Tensor,
        sums: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Each merge rounds its result; with several parts the sum is kept in float32 until the end.
        total = values.float() if len(earlier.parts) > 1 else values
        for part, cu_kv_lens in earlier.parts:
            k, v = self._own_heads(self._vectors(latents, earlier.places[part]))
            others, other_sums = earlier_attention(
                q, k, v, group.cu_q_lens, cu_kv_lens, self.spec.scale
            )
            del k, v  # Frees their memory before `others` is widened.
            merged(total, sums, others.to(total.dtype), other_sums, out=total)
            sums = torch.logaddexp(sums, other_sums)
        return total.to(values.dtype), sums

    def _vectors(self, latents: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return read_latents(latents, self.in_pool, self.spec, places, self.o_proj.dtype)

    def _own_heads(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, rank + rope] -> keys [T, H, nope + rope] and values [T, H, value]."""
        sizes, (to_keys, to_values) = self.config, self._absorbed
        latent, key = torch.split(vectors, [sizes.kv_rank, sizes.rope_dim], dim=1)
        heads, (rows, rank) = to_keys.shape[0], latent.shape
        of_all = latent.expand(heads, rows, rank)
        k = vectors.new_empty((rows, heads, sizes.nope_dim + sizes.rope_dim))
        torch.bmm(of_all, to_keys.transpose(1, 2), out=k[..., : sizes.nope_dim].transpose(0, 1))
        k[..., sizes.nope_dim :] = key.unsqueeze(1)
        return k, torch.bmm(of_all, to_values).transpose(0, 1)

    def folds(self, rows: int, step: Step) -> bool:
        return False

    def shape_key(self) -> object:
        return LatentAttention, shape_of(self.down_proj), shape_of(self.o_proj)


def latent_layout(
    sizes: LatentConfig, num_layers: int, dtype: torch.dtype, page_size: int
) -> CacheLayout:
    """The layout of latents: one vector per position, the latent followed by the shared key."""
    plane = PagedPlane(
        layers=num_layers,
        heads=1,
        dim=sizes.kv_rank + sizes.rope_dim,
        dtype=dtype_name(dtype),
        parts=("latent",),
    )
    return CacheLayout.of_plane(plane, page_size)
