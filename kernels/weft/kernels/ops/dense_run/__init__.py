"""Consecutive layers of grouped-query attention and a gated MLP as one native operation on a CPU.

At small batches a single operation takes some tens of microseconds, about as long as its call and
the start of a thread team. So a run makes one call a step instead of seven a layer.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from weft.kernels.ops.attention import check_ancestors, check_attention_pool, check_key_ends
from weft.kernels.ops.attention.cpu import fits_native
from weft.kernels.ops.attention.spec import AttentionMetadata, AttentionSpec
from weft.kernels.ops.linear.spec import LinearWeight
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.cpu import NativeLora, describe_lora
from weft.kernels.ops.lora.spec import Group, LoraStep
from weft.kernels.ops.norm import Norm
from weft.kernels.ops.pages.cpu import describe_pool
from weft.kernels.ops.pages.pool import check_rows, check_tables
from weft.kernels.ops.peers.spec import CpuPeers
from weft.kernels.ops.rope import check_rope_pool
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared import cpu


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """The parts of one layer. All layers of a run have equal shapes; windows and page groups may
    differ.
    """

    input_norm: Norm
    qkv: LinearWeight
    """[(Hq + 2 * Hkv) * D, H]."""
    q_norm: Norm | None
    k_norm: Norm | None
    o: LinearWeight
    """[H, Hq * D]."""
    post_norm: Norm
    gate_up: LinearWeight
    """[2 * I, H], from `pack_gate_up`."""
    down: LinearWeight
    """[H, I]."""
    cos_sin: torch.Tensor
    """[max_positions, D] float32, shared by all layers."""
    spec: AttentionSpec
    group: int = 0
    pool_shift: int = 0
    """Added to the layer's number, it gives the layer's index in its group's pool."""

    @property
    def products(self) -> dict[Group, LinearWeight]:
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}


class _Pools(NamedTuple):
    of_groups: tuple[weakref.ref[torch.Tensor], ...]
    first: int
    described: tuple[cpu.PoolStruct, ...]
    """One description for each page group."""

    def are_of(self, groups: Sequence[torch.Tensor], first: int) -> bool:
        """`first` is the number of the run's first layer."""
        if first != self.first or len(groups) != len(self.of_groups):
            return False
        return all(own() is pool for own, pool in zip(self.of_groups, groups, strict=True))


class _Described(NamedTuple):
    batch: cpu.BatchStruct
    scratch: torch.Tensor
    lora: NativeLora | None
    pages: ctypes.Array[cpu.PagesStruct]


class DenseRun:
    """Layers that run in one call: for each, hidden += attention(norm(hidden)); hidden +=
    mlp(norm(hidden)).
    """

    def __init__(self, native: cpu.NativeCpu, layers: Sequence[DenseLayer]) -> None:
        self._native = native
        self._layers = tuple(layers)
        self._described = [_describe_layer(layer) for layer in layers]
        addresses = [ctypes.addressof(layer) for layer in self._described]
        self._addresses = (ctypes.c_void_p * len(layers))(*addresses)
        self._in_pools: dict[int, tuple[int, int]] = {}
        """Least and largest index of the run's layers in each page group's pool, less `first`."""
        self._pools: _Pools | None = None
        for index, layer in enumerate(layers):
            at = index + layer.pool_shift
            lowest, highest = self._in_pools.get(layer.group, (at, at))
            self._in_pools[layer.group] = min(lowest, at), max(highest, at)

    @classmethod
    def of(cls, layers: Sequence[DenseLayer | None]) -> DenseRun | None:
        """The run of layers of equal shape; None if a layer is None or its weights are not in
        native form.
        """
        found = [layer for layer in layers if layer is not None and _has_plain_softmax(layer.spec)]
        if len(found) < len(layers):
            return None
        if any(w.native is None for layer in found for w in layer.products.values()):
            return None
        native = cpu.native_cpu()  # Loaded where weights are for it: a GPU has other uses of time.
        return None if native is None else cls(native, found)

    def fits(self, pool: torch.Tensor) -> bool:
        """Whether the native operation handles these heads."""
        if self._pools is not None and self._pools.of_groups[0]() is pool:
            return True
        return fits_native(self._native, self._layers[0].spec.heads, pool)

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionMetadata,
        pool: torch.Tensor,
        first: int,
        lora: LoraStep | None = None,
        taps: Taps | None = None,
        further: Sequence[AttentionMetadata] = (),
        peers: CpuPeers | None = None,
    ) -> torch.Tensor:
        """Runs a step through all layers; stores K and V of every row in each.

        Args:
            hidden: [T, H], contiguous; overwritten.
            positions: [T] int64.
            step: The rows as layers of the first page group see them.
            pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page.
            first: Number of the first of these layers.
            taps: Receives the stream as it enters those of these layers that it names, or None.
            further: The rows as layers of the other page groups see them, each with its pool.
            peers: The ranks that hold the other shares of these layers, or None.

        Returns:
            `hidden`.

        Raises:
            IndexError: A position, place, length, page or row of an adapter points outside.
        """
        described = self._describe_pools(pool, first, further)
        # Kept until the end.
        whole = self._describe(positions, step, described, lora, first, further)
        batch, of_lora = whole.batch, whole.lora
        count, qkv = len(self._layers), self._layers[0].qkv
        if (
            hidden.shape != (batch.rows, qkv.in_features)
            or hidden.dtype != qkv.dtype
            or not hidden.is_contiguous()
            or (of_lora is not None and first > of_lora.num_layers - count)
        ):
            raise ValueError(
                f"hidden {tuple(hidden.shape)} {hidden.dtype} contiguous={hidden.is_contiguous()} "
                f"does not fit the step: {batch.rows} rows, {count} layers from {first} on"
            )
        if peers is not None:
            partial = torch.empty(hidden.shape, dtype=torch.float32)
            batch.peers, batch.partial = ctypes.addressof(peers.native()), partial.data_ptr()
        follower = None if taps is None else taps.follower_of(first, count)
        after = None if follower is None else follower.native()
        status = self._native.decoder_layers(
            self._addresses,
            first,
            count,
            ctypes.byref(batch),
            ctypes.byref(described[0]),
            hidden.data_ptr(),
            None if taps is None else ctypes.byref(taps.native(hidden)),
            None if after is None else ctypes.byref(after),
        )
        if status:
            cpu.check_status(status, "decoder_layers")
        if peers is not None:
            peers.check(batch.lost)
        if follower is not None and after is not None:
            follower.done()
        return hidden

    def _describe_pools(
        self, pool: torch.Tensor, first: int, further: Sequence[AttentionMetadata]
    ) -> tuple[cpu.PoolStruct, ...]:
        pools = (pool, *[group.pool_of(pool) for group in further])
        if self._pools is not None and self._pools.are_of(pools, first):
            return self._pools.described
        layer, count = self._layers[0], len(self._layers)
        spec, dtype = layer.spec, layer.qkv.dtype
        heads = (spec.heads, spec.kv_heads)
        for own in pools:
            check_rope_pool(layer.qkv.out_features, dtype, layer.cos_sin, own, heads)
            check_attention_pool((spec.heads, spec.dim), dtype, own)
            if own.shape[-2] != pool.shape[-2]:
                raise ValueError(f"pages of {own.shape[-2]} positions beside {pool.shape[-2]}")
        sizes = [own.shape[2] for own in pools]
        for group, (lowest, highest) in self._in_pools.items():
            if (
                first < 0
                or group >= len(sizes)
                or first + lowest < 0
                or first + highest >= sizes[group]
            ):
                raise ValueError(
                    f"a run of layers {first} to {first + count - 1} does not fit the step's pools "
                    f"of {sizes} layers"
                )
        described = tuple(describe_pool(own, dtype) for own in pools)
        self._pools = _Pools(tuple(map(weakref.ref, pools)), first, described)
        return described

    def _describe(
        self,
        positions: torch.Tensor,
        step: AttentionMetadata,
        pools: Sequence[cpu.PoolStruct],
        lora: LoraStep | None,
        first: int,
        further: Sequence[AttentionMetadata],
    ) -> _Described:
        layer, native = self._layers[0], self._native
        spec, table, rows = layer.spec, step.page_table, positions.shape[0]
        dtype = layer.qkv.dtype
        for group in (step, *further):
            check_rows(rows, positions, group.places)
            check_tables(group)
        if step.ancestors is not None:
            for one in self._layers:
                check_ancestors(step.ancestors, rows, one.spec.window, step.max_q_len)
        check_key_ends(step, rows)
        attention = cpu.AttentionStruct(
            None,
            None,
            table.data_ptr(),
            step.cu_q_lens.data_ptr(),
            step.kv_lens.data_ptr(),
            *table.shape,
            table.stride(0),
            spec.heads,
            spec.scale,
            ancestors=None if step.ancestors is None else step.ancestors.data_ptr(),
            key_ends=None if step.key_ends is None else step.key_ends.data_ptr(),
        )
        struct = ctypes.byref(self._described[0])
        width = native.layer_scratch_width(struct, ctypes.byref(attention), spec.dim)
        scratch = torch.empty(rows * width, dtype=dtype)
        of_lora = None
        if lora is not None:
            of_lora = self._describe_lora(lora, rows, first)
        pages = (cpu.PagesStruct * len(further))(*map(_describe_pages, further, pools[1:]))
        batch = cpu.BatchStruct(
            attention,
            positions.data_ptr(),
            step.places.data_ptr(),
            layer.cos_sin.data_ptr(),
            layer.cos_sin.shape[0],
            rows,
            scratch.data_ptr(),
            None if of_lora is None else of_lora.address,
            ctypes.addressof(pages) if further else None,
            len(further),
        )
        status = native.check_batch(ctypes.byref(batch), ctypes.byref(pools[0]))
        if status:
            cpu.check_status(status, "check_batch")
        return _Described(batch, scratch, of_lora, pages)

    def _describe_lora(self, lora: LoraStep, rows: int, first: int) -> NativeLora | None:
        groups = []
        for group, weight in self._layers[0].products.items():
            addition = lora.of(group, first)
            groups.append(() if addition is None else addition.parts)
            if addition is not None:
                size = (rows, weight.in_features)
                check_addition((rows, weight.out_features), size, weight.dtype, addition)
        return describe_lora(self._native, groups, lora.segments) if any(groups) else None


def _has_plain_softmax(spec: AttentionSpec) -> bool:
    return spec.sinks is None and spec.softcap is None and not spec.is_chunked


def _describe_layer(layer: DenseLayer) -> cpu.LayerStruct:
    hidden, dim, dtype = layer.qkv.in_features, layer.spec.dim, layer.qkv.dtype
    spec, gate_up, down = layer.spec, layer.gate_up, layer.down
    for norm, size in (
        (layer.input_norm, hidden),
        (layer.post_norm, hidden),
        (layer.q_norm, dim),
        (layer.k_norm, dim),
    ):
        if norm is not None and (norm.weight.shape != (size,) or norm.weight.dtype != dtype):
            weight = norm.weight
            raise ValueError(f"a norm {tuple(weight.shape)} {weight.dtype} is not [{size}] {dtype}")
    shapes = [(w.out_features, w.in_features, w.dtype) for w in layer.products.values()]
    inner, q_size = down.in_features, spec.heads * dim
    if not gate_up.gated or shapes != [
        (q_size + 2 * spec.kv_heads * dim, hidden, dtype),
        (hidden, q_size, dtype),
        (2 * inner, hidden, dtype),
        (hidden, inner, dtype),
    ]:
        raise ValueError(f"projections of a layer do not fit together: {shapes}, {spec}")
    return cpu.LayerStruct(
        *(w.address for w in layer.products.values()),
        layer.input_norm.weight.data_ptr(),
        layer.post_norm.weight.data_ptr(),
        None if layer.q_norm is None else layer.q_norm.weight.data_ptr(),
        None if layer.k_norm is None else layer.k_norm.weight.data_ptr(),
        layer.input_norm.eps,
        spec.window or 0,
        layer.group,
        layer.pool_shift,
    )


def _describe_pages(group: AttentionMetadata, pool: cpu.PoolStruct) -> cpu.PagesStruct:
    table = group.page_table
    return cpu.PagesStruct(
        pool, table.data_ptr(), table.shape[1], table.stride(0), group.places.data_ptr()
    )
