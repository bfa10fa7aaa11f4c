"""Attention of transformers' modules: recorded once over a short text, then over paged K and V."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from weft.contract.errors import ModelError
from weft.engine.model.archs.by_transformers.fused import (
    Left,
    NotLeftError,
    Rotation,
    rotation_table,
)
from weft.engine.model.archs.by_transformers.plan import RankPlan
from weft.engine.model.archs.by_transformers.products import summed
from weft.engine.model.layers.attention import plane_of
from weft.engine.model.step import Step
from weft.engine.parallel.shards import kv_heads_of
from weft.kernels.ops.attention import paged_attention
from weft.kernels.ops.attention.spec import AttentionSpec
from weft.kernels.ops.pages.pool import PlaneInPage
from weft.kernels.ops.peers.spec import Peers
from weft.kernels.ops.rope import rope_and_cache

IMPLEMENTATION = "weft"
"""Name under which transformers finds this attention."""
_HARMLESS = frozenset(
    (
        *("position_ids", "use_cache", "return_dict", "output_attentions", "output_hidden_states"),
        *("cache_position", "cache", "past_key_values", "is_causal", "output_router_logits"),
        *("logits_to_keep", "layer_idx", "position_embeddings"),
    )
)
"""Arguments of attention that do not change its result here."""
_WIDTH = 16
"""A head in pages is a multiple of so many elements."""


class Computes(Protocol):
    """What computes attention during a pass through a model."""

    def __call__(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        """Heads of one call, [1, heads, T, D] each -> [1, T, Hq, Dv]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of attention in a pass. Calls come in the same order in every pass."""

    kv_heads: int
    """Over all ranks."""
    dim: int
    """Elements of a head in pages."""
    value_dim: int
    spec: AttentionSpec
    """Of this rank's heads."""
    share: Share | None = None
    """None: the module makes no other heads than this rank's."""


@dataclass(frozen=True, slots=True)
class Share:
    """The heads whose attention a rank computes, of a module that makes those of all ranks."""

    heads: slice
    kv_heads: slice
    num_heads: int
    """Heads of all ranks."""
    peers: Peers

    def gathered(self, mixed: torch.Tensor) -> torch.Tensor:
        """[1, T, this rank's heads, D] -> [1, T, heads of all ranks, D]."""
        whole = mixed.new_zeros((*mixed.shape[:2], self.num_heads, mixed.shape[3]))
        whole[:, :, self.heads] = mixed
        return summed(whole, self.peers)


_computes: ContextVar[Computes] = ContextVar("weft_attention")


@contextmanager
def attention_by(computes: Computes) -> Iterator[None]:
    """Inside, transformers' modules have attention computed by this object."""
    token = _computes.set(computes)
    try:
        yield
    finally:
        _computes.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return _computes.get()(module, query, key, value, attention_mask, options), None


AttentionInterface.register(IMPLEMENTATION, _attention)


class Recorder:
    """Computes attention of one text and records what each call asks for. Raises ModelError, by
    name, for what pages cannot have.
    """

    def __init__(self, longest: int, plan: RankPlan | None = None) -> None:
        self.calls: list[Call] = []
        self._longest, self._plan = longest, plan

    def __call__(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        where = type(module).__name__
        call = self._call(where, module, q, k, v, mask, options)
        self.calls.append(call if self._plan is None else _of_rank(call, module, self._plan))
        return _dense(call.spec, q, k, v)

    def _call(
        self,
        where: str,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> Call:
        if q.shape[0] != 1 or k.shape[2] != q.shape[2] or k.shape[:3] != v.shape[:3]:
            raise ModelError(f"{where} attends to another sequence than its own")
        if options.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ModelError(f"{where} attends to later tokens")
        known = {"scaling", "dropout", "sliding_window", "softcap", "s_aux"} | _HARMLESS
        others = [name for name, value in options.items() if name not in known if value is not None]
        if others:
            raise ModelError(f"{where} passes {', '.join(sorted(others))} to attention")
        window = self._window(where, mask, options.get("sliding_window"))
        scale, sinks = options.get("scaling"), options.get("s_aux")
        if scale is None:
            scale = getattr(module, "scaling", None) or q.shape[3] ** -0.5
        dim = -(-max(k.shape[3], v.shape[3]) // _WIDTH) * _WIDTH
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        spec = AttentionSpec(
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=dim,
            scale=float(scale),
            window=window,
            sinks=sinks,
            softcap=options.get("softcap"),
        )
        return Call(kv_heads=k.shape[1], dim=dim, value_dim=v.shape[3], spec=spec)

    def _window(self, where: str, mask: torch.Tensor | None, named: int | None) -> int | None:
        if named is not None and named >= self._longest:
            named = None
        if mask is None:
            return named
        found = getattr(mask, "weft_window", -1)
        if found == -1:
            raise ModelError(f"{where} gets a mask of the model's own making")
        if named is not None and named != found:
            raise ModelError(f"{where} has a window of {named} positions and a mask of {found}")
        return int(found) if found is not None else None


def _of_rank(call: Call, module: torch.nn.Module, plan: RankPlan) -> Call:
    """A call as one rank computes it, of a module that the plan divides or leaves whole."""
    rank, size, spec = plan.shard.rank, plan.shard.size, call.spec
    if plan.divides(module):
        return replace(call, kv_heads=call.kv_heads * size)
    heads = plan.shard.of(spec.heads, 1, may_repeat=False)
    kv_heads = kv_heads_of(spec.kv_heads, rank, size)
    own = spec._replace(
        heads=heads.stop - heads.start,
        kv_heads=kv_heads.stop - kv_heads.start,
        sinks=None if spec.sinks is None else spec.sinks[heads].contiguous(),
    )
    return replace(call, spec=own, share=Share(heads, kv_heads, spec.heads, plan.peers))


def _dense(spec: AttentionSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one text: [1, heads, T, D] -> [1, T, Hq, Dv]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1).float() for x in (k, v))
    scores = q.float() @ k.transpose(2, 3) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    at = torch.arange(q.shape[2], device=q.device)
    seen = at[None, :] <= at[:, None]
    if spec.window is not None:
        seen &= at[None, :] > at[:, None] - spec.window
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks[None, :, None, None].expand(1, -1, scores.shape[2], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : q.shape[2]]
    return (weights @ v).to(q.dtype).transpose(1, 2).contiguous()


@contextmanager
def noted_masks(longest: int) -> Iterator[None]:
    """Inside, masks that transformers makes say which window they have. Raises ModelError for one
    that is no window.
    """

    def mask(*, q_length: int, kv_length: int, mask_function: Any, **_: Any) -> torch.Tensor:
        made = torch.ones((1, 1, q_length, kv_length), dtype=torch.bool)
        made.weft_window = window_of(mask_function, longest)  # type: ignore[attr-defined]
        return made

    AttentionMaskInterface.register(IMPLEMENTATION, mask)
    try:
        yield
    finally:
        # Without it, transformers makes no masks for this attention, which needs none.
        del AttentionMaskInterface._global_mapping[IMPLEMENTATION]


def window_of(mask_function: Callable[..., torch.Tensor], longest: int) -> int | None:
    """The window of a mask, given by a function of batch, head, row and position; None: every row
    sees all positions up to its own. Raises ModelError for any other mask.
    """

    def seen_by(row: int) -> torch.Tensor:
        kv = torch.arange(longest)
        zero = torch.zeros((), dtype=torch.int64)
        seen = mask_function(zero, zero, torch.full((), row), kv)
        return seen.expand(longest)

    try:
        last = seen_by(longest - 1)
        window = int(last.sum())
        rows = {longest - 1, longest - 2, max(0, longest - 1 - window // 2), window // 2, 0}
        at = torch.arange(longest)
        fits = all(
            torch.equal(seen_by(row), (at <= row) & (at > row - window)) for row in rows if row >= 0
        )
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(f"its attention has a mask that depends on values: {error}") from error
    if not fits:
        raise ModelError("its attention has a mask that is neither causal nor a sliding window")
    return None if window >= longest else window


class PagedCalls:
    """Computes the calls of one pass over the pages of a step; made once for each pass."""

    def __init__(
        self,
        calls: tuple[Call, ...],
        places: Mapping[int, tuple[int, int, PlaneInPage | None]],
        turns: Mapping[int, torch.Tensor],
        step: Step,
        pool: torch.Tensor,
        rotation: Rotation | None = None,
    ) -> None:
        """Prepares a pass.

        Args:
            calls: The recorded calls.
            places: Page group, layer in the pool, and plane of each call.
            turns: [1, D] float32 by D: the rotation that changes nothing.
            step: Tokens and their pages.
            rotation: Rotations that the pass leaves to attention; None: it leaves none.
        """
        self._calls, self._places, self._turns = calls, places, turns
        self._step, self._pool = step, pool
        self._zeros = torch.zeros_like(step.positions)
        self._rotation = rotation
        self._table: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._rows: torch.Tensor | None = None
        self._next = 0

    def __call__(
        self,
        module: torch.nn.Module,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: Mapping[str, Any],
    ) -> torch.Tensor:
        call, (group, in_pool, plane) = self._calls[self._next], self._places[self._next]
        self._next += 1
        spec, pages = call.spec, self._step.groups[group]
        pool = plane_of(pages, self._pool, plane)
        left = None if self._rotation is None else self._rotation.take(q, k)
        positions, table = self._turned(left, spec.dim)
        if call.share is not None:
            q = q[:, call.share.heads]
            k, v = (heads[:, call.share.kv_heads] for heads in (k, v))
        qkv = _of_product(q, k, v, spec.dim)
        if qkv is None:
            qkv = torch.cat([_rows(heads, spec.dim) for heads in (q, k, v)], dim=1)
        q_norm, k_norm = (None, None) if left is None else (left.q_norm, left.k_norm)
        rotated = rope_and_cache(
            qkv,
            positions,
            table,
            pool,
            in_pool,
            pages.places,
            spec.heads,
            spec.kv_heads,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            1e-6 if q_norm is None else q_norm.eps,
        )
        mixed = paged_attention(rotated, pool, in_pool, spec, pages)
        made = mixed.view(1, -1, spec.heads, spec.dim)[..., : call.value_dim].contiguous()
        return made if call.share is None else call.share.gathered(made)

    def _turned(self, left: Left | None, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of a table of cosines and sines, and the table."""
        if left is None:
            return self._zeros, self._turns[dim]
        cos, sin = left.cos, left.sin
        if cos.shape[-1] != dim:
            raise NotLeftError
        if self._table is None or self._table[0] is not cos or self._table[1] is not sin:
            self._table = (cos, sin, rotation_table(cos, sin))
        if self._rows is None:
            self._rows = torch.arange(len(self._zeros), device=cos.device)
        return self._rows, self._table[2]


def _of_product(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor | None:
    """[T, (Hq + 2 * Hkv) * dim]: the rows of which Q, K and V are views; None: they are apart."""
    heads, count, kv_heads = q.shape[1], q.shape[2], k.shape[1]
    row, size = (heads + 2 * kv_heads) * dim, q.element_size()
    begins = (0, heads * dim, (heads + kv_heads) * dim)
    for part, begin in zip((q, k, v), begins, strict=True):
        has_rows = part.stride(2) == row or count == 1
        fits = part.shape[3] == dim and part.stride(3) == 1 and part.stride(1) == dim and has_rows
        if not fits or part.data_ptr() != q.data_ptr() + begin * size or part.dtype != q.dtype:
            return None
    # Rows that only lie side by side by chance are in other memory.
    whole = q.untyped_storage()
    if any(part.untyped_storage().data_ptr() != whole.data_ptr() for part in (k, v)):
        return None
    return q.as_strided((count, row), (row, 1))


def _rows(heads: torch.Tensor, dim: int) -> torch.Tensor:
    """[1, heads, T, up to dim] -> [T, heads * dim], with zeros behind each head."""
    rows = heads[0].transpose(0, 1)
    if rows.shape[2] < dim:
        rows = F.pad(rows, (0, dim - rows.shape[2]))
    return rows.flatten(1)
