"""A stack of pre-norm decoder layers (Llama, Qwen2, Qwen3, Qwen3-MoE) as one operation.

At small batches a single operation takes some tens of microseconds, about as long as the call and
the start of a thread team around it: one call a step instead of seven a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from weft.kernels import cpu
from weft.kernels.attention import check_ancestors, check_attention, fits_native, paged_attention
from weft.kernels.linear import LinearWeight, gate_up_silu, linear
from weft.kernels.lora import (
    Group,
    LoraStep,
    NativeLora,
    addition_to,
    check_addition,
    describe_lora,
    experts_addition,
)
from weft.kernels.moe import ExpertWeights, moe, route
from weft.kernels.norm import rms_norm
from weft.kernels.rope import check_rope, rope_and_cache


@dataclass(frozen=True, slots=True)
class GatedMlpWeight:
    """Parameters of down(silu(gate(x)) * up(x))."""

    gate_up: LinearWeight
    """[2 * I, H], from `pack_gate_up`."""
    down: LinearWeight
    """[H, I]."""

    @property
    def in_features(self) -> int:
        """H, 0 if the parts do not fit together."""
        fits = self.gate_up.gated and 2 * self.down.in_features == self.gate_up.out_features
        fits = fits and self.down.out_features == self.gate_up.in_features
        return self.down.out_features if fits else 0

    def shapes(self) -> tuple[object, ...]:
        """The shapes that must be equal in all layers of a stack."""
        return tuple((w.out_features, w.in_features, w.dtype) for w in (self.gate_up, self.down))


@dataclass(frozen=True, slots=True)
class SparseMlpWeight:
    """Parameters of a mixture of experts."""

    router: LinearWeight
    """[E, H]."""
    experts: ExpertWeights
    top_k: int
    renormalise: bool
    """The shares of a row's experts add up to 1."""

    @property
    def in_features(self) -> int:
        """H, 0 if the parts do not fit together."""
        fits = self.router.out_features == self.experts.num_experts
        fits = fits and self.router.in_features == self.experts.hidden_size
        return self.experts.hidden_size if fits else 0

    def shapes(self) -> tuple[object, ...]:
        """The shapes that must be equal in all layers of a stack."""
        experts = self.experts
        sizes = (experts.num_experts, experts.inner_size, experts.hidden_size)
        return (*sizes, self.top_k, experts.dtype, self.router.dtype)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        lora: LoraStep | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """[T, H], [T, H] or None -> [T, H], with what adapters add in this layer."""
        added = addition_to(lora, "router", layer)
        logits = linear(x, self.router, out_dtype=torch.float32, lora=added)
        routing = route(logits, self.top_k, renormalise=self.renormalise)
        return moe(x, routing, self.experts, residual, experts_addition(lora, layer))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayerWeight:
    """The parameters of one decoder layer."""

    input_norm: torch.Tensor
    """[H]."""
    qkv: LinearWeight
    """[(Hq + 2 * Hkv) * D, H]."""
    q_norm: torch.Tensor | None
    """[D]: RMS norm of each head of q before the rotation (Qwen3)."""
    k_norm: torch.Tensor | None
    """[D]."""
    o: LinearWeight
    """[H, Hq * D]."""
    post_norm: torch.Tensor
    """[H]."""
    mlp: GatedMlpWeight | SparseMlpWeight
    eps: float
    """Epsilon of all norms."""
    window: int | None
    """Positions that a row attends to at most; layers of one stack may differ in it."""
    native: cpu.LayerStruct | None
    """The same for the native operation; None if some part is not in native form."""

    def shapes(self) -> tuple[object, ...]:
        """The shapes that must be equal in all layers of a stack."""
        parts = ((part.out_features, part.in_features) for part in (self.qkv, self.o))
        return (self.qkv.dtype, *parts, self.mlp.shapes())


class Follower(Protocol):
    """Work that continues from the tapped states: in the native operation with its threads, or
    beside the layers that follow.
    """

    def native(self) -> cpu.DraftWriteStruct | None:
        """Its native form, valid as long as this object lives; None: it has none."""

    def done(self) -> None:
        """Called when the native operation has run it."""

    def begin(self) -> None:
        """Called on a GPU once all states have been tapped, before the layers that follow."""


class Taps:
    """Collects the residual stream as it enters some layers, side by side.

    Args:
        layers: Indices in the pool; a layer may be there twice.
        out: [T, len(layers) * H], contiguous, of a step of T rows: written.
        follower: Told once it is done; where it is not, it is left to the caller. Or None.

    Raises:
        ValueError: Too many layers, or `out` cannot be divided among them.
    """

    def __init__(
        self, layers: Sequence[int], out: torch.Tensor, follower: Follower | None = None
    ) -> None:
        count, width = len(layers), out.shape[1]
        if not 0 < count <= cpu.MAX_TAPS or width % count or not out.is_contiguous():
            raise ValueError(f"{count} inputs of layers do not fit {tuple(out.shape)}")
        self._layers = tuple(layers)
        self._out = out
        self._follower = follower

    def take(self, layer: int, hidden: torch.Tensor) -> None:
        """Copies what enters `layer`, [T, H], if it is wanted."""
        for place in self.places_of(layer):
            place.copy_(hidden)

    def have_taken(self, layer: int) -> None:
        """Begins what follows if nothing is wanted behind what enters `layer`, which was taken."""
        if self._follower is not None and layer == max(self._layers):
            self._follower.begin()

    def places_of(self, layer: int) -> list[torch.Tensor]:
        """Where what enters `layer` is wanted, [T, H] each: columns of a wider matrix."""
        places = self._out.chunk(len(self._layers), dim=1)
        return [
            place for place, wanted in zip(places, self._layers, strict=True) if wanted == layer
        ]

    def follower_of(self, first: int, count: int) -> Follower | None:
        """The work that can run directly behind these layers, if any."""
        ends = (min(self._layers), max(self._layers))
        return self._follower if first <= ends[0] and ends[1] < first + count else None

    def native(self, hidden: torch.Tensor) -> cpu.TapsStruct:
        """The same for the native operation on `hidden`; valid as long as this lives."""
        rows, width = hidden.shape
        count = len(self._layers)
        if self._out.shape != (rows, count * width) or self._out.dtype != hidden.dtype:
            raise ValueError(
                f"{count} inputs of layers {tuple(hidden.shape)} {hidden.dtype} do not fit "
                f"{tuple(self._out.shape)} {self._out.dtype}"
            )
        described = cpu.TapsStruct(self._out.data_ptr(), count * width, count)
        for index, layer in enumerate(self._layers):
            described.layers[index], described.columns[index] = layer, index * width
        return described


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """Consecutive layers of the same shapes, from `stack_layers`."""

    layers: tuple[DecoderLayerWeight, ...]
    native: ctypes.Array[ctypes.c_void_p] | None
    """Addresses of the native layers; None if some layer has no native form."""


class NativeStep(NamedTuple):
    """A step described to the native operation."""

    batch: cpu.BatchStruct
    pool: cpu.PoolStruct
    scratch: torch.Tensor
    """Scratch memory of the layers."""
    lora: NativeLora | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderStep:
    """Inputs that all layers of one step share; the tensors are as in `rope_and_cache` and
    `paged_attention`. Must not outlive a change of any of them.
    """

    pool: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos_sin: torch.Tensor
    page_table: torch.Tensor
    cu_q_lens: torch.Tensor
    kv_lens: torch.Tensor
    num_heads: int
    scale: float
    max_q_len: int
    max_kv_len: int
    lora: LoraStep | None
    """The step's adapters; None if no token uses one."""
    ancestors: torch.Tensor | None
    """[T] int64 where rows form trees, else None."""
    is_cold: bool
    """Requests of several rows are known to have nothing before the step."""
    native: NativeStep | None
    """The same for the native operation."""


def pack_decoder_layer(
    *,
    input_norm: torch.Tensor,
    qkv: LinearWeight,
    o: LinearWeight,
    post_norm: torch.Tensor,
    mlp: GatedMlpWeight | SparseMlpWeight,
    eps: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    window: int | None = None,
) -> DecoderLayerWeight:
    """Puts a layer's parameters together; see `DecoderLayerWeight`.

    Raises:
        ValueError: Shapes or dtypes do not fit together, or the window is empty.
    """
    if window is not None and window < 1:
        raise ValueError(f"window is {window}")
    hidden, dtype = qkv.in_features, qkv.dtype
    for name, norm, size in (
        ("input_norm", input_norm, hidden),
        ("post_norm", post_norm, hidden),
        ("q_norm", q_norm, None if q_norm is None else q_norm.numel()),
        ("k_norm", k_norm, None if q_norm is None else q_norm.numel()),
    ):
        if norm is not None and (norm.shape != (size,) or norm.dtype != dtype):
            raise ValueError(f"{name} {tuple(norm.shape)} {norm.dtype} is not [{size}] {dtype}")
    widths = (o.out_features, mlp.in_features)
    if widths != (hidden, hidden):
        raise ValueError(f"projections of a layer do not fit together: {widths}, hidden {hidden}")
    parts = [qkv, o, *((mlp.gate_up, mlp.down) if isinstance(mlp, GatedMlpWeight) else ())]
    dtypes = {part.dtype for part in parts}
    if isinstance(mlp, SparseMlpWeight):
        dtypes |= {mlp.router.dtype, mlp.experts.dtype}
    if len(dtypes) > 1:
        raise ValueError(f"projections of a layer differ in dtype: {dtypes}")
    native = None
    if isinstance(mlp, GatedMlpWeight) and all(part.native is not None for part in parts):
        native = cpu.LayerStruct(
            *(part.address for part in parts),
            input_norm.data_ptr(),
            post_norm.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            window or 0,
        )
    return DecoderLayerWeight(
        input_norm=input_norm,
        qkv=qkv,
        q_norm=q_norm,
        k_norm=k_norm,
        o=o,
        post_norm=post_norm,
        mlp=mlp,
        eps=eps,
        window=window,
        native=native,
    )


def stack_layers(layers: Sequence[DecoderLayerWeight]) -> DecoderLayers:
    """Joins layers into a stack.

    Raises:
        ValueError: There are none, or they differ in shape or dtype.
    """
    if len({layer.shapes() for layer in layers}) != 1:
        raise ValueError("a stack needs one or more layers of the same shapes and dtype")
    native = None
    if all(layer.native is not None for layer in layers):
        addresses = [ctypes.addressof(x.native) for x in layers if x.native is not None]
        native = (ctypes.c_void_p * len(layers))(*addresses)
    return DecoderLayers(tuple(layers), native)


def prepare_step(
    layer: DecoderLayerWeight,
    *,
    pool: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    page_table: torch.Tensor,
    cu_q_lens: torch.Tensor,
    kv_lens: torch.Tensor,
    num_heads: int,
    scale: float,
    max_q_len: int,
    max_kv_len: int,
    lora: LoraStep | None = None,
    ancestors: torch.Tensor | None = None,
    is_cold: bool = False,
) -> DecoderStep:
    """Checks and describes a step once for all its layers.

    Args:
        layer: Any of the layers that will run; all must have the same shapes.
        pool: [num_pages, Hkv, layers, 2, page_size, D], contiguous within a page.
        positions: [T] int64, rows of `cos_sin`.
        slots: [T] int64: page * page_size + offset of each token's K and V.
        cos_sin: [max_positions, D] float32.
        page_table: [R, max_pages] int32.
        cu_q_lens: [R + 1] int32.
        kv_lens: [R] int32.
        num_heads: Hq.
        scale: Factor on the attention scores.
        max_q_len: Largest number of rows of a request.
        max_kv_len: Largest kv_len.
        lora: The adapters of these T tokens, or None.
        ancestors: [T] int64 where rows form trees, else None.
        is_cold: Requests of several rows have nothing before the step.

    Raises:
        ValueError: An argument does not fit.
        IndexError: A position, slot, length, page or row of an adapter points outside.
    """
    if ancestors is not None:
        check_ancestors(ancestors, positions.shape[0], None, max_q_len)
    step = DecoderStep(
        pool=pool,
        positions=positions,
        slots=slots,
        cos_sin=cos_sin,
        page_table=page_table,
        cu_q_lens=cu_q_lens,
        kv_lens=kv_lens,
        num_heads=num_heads,
        scale=scale,
        max_q_len=max_q_len,
        max_kv_len=max_kv_len,
        lora=lora,
        ancestors=ancestors,
        is_cold=is_cold,
        native=None,
    )
    native = cpu.native_cpu()
    if layer.native is None or native is None or not fits_native(native, num_heads, pool):
        return step
    return replace(step, native=_describe_step(native, layer, step))


def _describe_step(
    native: cpu.NativeCpu, layer: DecoderLayerWeight, step: DecoderStep
) -> NativeStep:
    """Checks a step and describes it for the native operation."""
    assert layer.native is not None
    pool, rows, dtype = step.pool, step.positions.shape[0], layer.qkv.dtype
    dim, kv_heads = pool.shape[-1], pool.shape[1]
    shape = (rows, (step.num_heads + 2 * kv_heads) * dim)
    widths = (layer.qkv.out_features, layer.o.in_features)
    if widths != (shape[1], step.num_heads * dim):
        raise ValueError(
            f"qkv and o {widths} do not fit {step.num_heads} heads of {tuple(pool.shape)}"
        )
    heads, table = (step.num_heads, kv_heads), step.page_table
    check_rope(shape, dtype, step.positions, step.cos_sin, pool, step.slots, heads)
    check_attention((rows, step.num_heads, dim), dtype, pool, table, step.cu_q_lens, step.kv_lens)
    attention = cpu.AttentionStruct(
        None,
        None,
        table.data_ptr(),
        step.cu_q_lens.data_ptr(),
        step.kv_lens.data_ptr(),
        *table.shape,
        table.stride(0),
        step.num_heads,
        step.scale,
        ancestors=None if step.ancestors is None else step.ancestors.data_ptr(),
    )
    width = native.layer_scratch_width(ctypes.byref(layer.native), ctypes.byref(attention), dim)
    scratch = torch.empty(rows * width, dtype=dtype)
    lora = None
    if step.lora is not None:
        _check_lora(layer, step.lora, rows)
        groups = (step.lora.qkv, step.lora.o, step.lora.gate_up, step.lora.down)
        if any(groups):
            lora = describe_lora(native, groups, step.lora.segments)
    batch = cpu.BatchStruct(
        attention,
        step.positions.data_ptr(),
        step.slots.data_ptr(),
        step.cos_sin.data_ptr(),
        step.cos_sin.shape[0],
        rows,
        scratch.data_ptr(),
        None if lora is None else lora.address,
    )
    described = cpu.describe_pool(pool)
    status = native.check_batch(ctypes.byref(batch), ctypes.byref(described))
    if status:
        cpu.check_status(status, "prepare_step")
    return NativeStep(batch, described, scratch, lora)


def _check_lora(w: DecoderLayerWeight, lora: LoraStep, rows: int) -> None:
    """Checks the LoRA inputs of a layer with a gated MLP."""
    assert isinstance(w.mlp, GatedMlpWeight)
    groups: tuple[tuple[Group, LinearWeight], ...] = (
        ("qkv", w.qkv),
        ("o", w.o),
        ("gate_up", w.mlp.gate_up),
        ("down", w.mlp.down),
    )
    for group, weight in groups:
        addition = lora.of(group, 0)
        if addition is not None:
            size = (rows, weight.in_features)
            check_addition((rows, weight.out_features), size, weight.dtype, addition)


def decoder_layers(
    hidden: torch.Tensor,
    stack: DecoderLayers,
    step: DecoderStep,
    first: int = 0,
    taps: Taps | None = None,
) -> torch.Tensor:
    """Runs layers; for each: hidden += attention(norm(hidden)); hidden += mlp(norm(hidden)).

    Stores K and V of every row in every layer.

    Args:
        hidden: [T, H], contiguous; becomes the result where the operation is native.
        stack: The layers.
        step: Inputs of the step, from `prepare_step`.
        first: Index in the pool of the stack's first layer.
        taps: Gets what enters those of these layers that it names, or None.

    Returns:
        [T, H].

    Raises:
        ValueError: An argument does not fit.
    """
    if step.ancestors is not None:
        for layer in stack.layers:
            check_ancestors(step.ancestors, hidden.shape[0], layer.window, step.max_q_len)
    if hidden.is_cuda:
        from weft.kernels.gpu import decoder_layers as gpu

        return gpu.decoder_layers(hidden, stack.layers, step, first, taps)
    native = cpu.native_cpu()
    count = len(stack.layers)
    if step.native is None or stack.native is None or native is None:
        for i, layer in enumerate(stack.layers):
            if taps is not None:
                taps.take(first + i, hidden)
            hidden = decoder_layer_reference(hidden, layer, step, first + i)
        return hidden
    batch, pool, _, lora = step.native
    qkv = stack.layers[0].qkv
    if (
        hidden.shape != (batch.rows, qkv.in_features)
        or hidden.dtype != qkv.dtype
        or not hidden.is_contiguous()
        or not 0 <= first <= pool.layers - count
        or (lora is not None and first > lora.num_layers - count)
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)} {hidden.dtype} contiguous={hidden.is_contiguous()} at "
            f"layers {first} to {first + count - 1} does not fit the step ({batch.rows} rows, "
            f"{pool.layers} layers)"
        )
    follower = None if taps is None else taps.follower_of(first, count)
    after = None if follower is None else follower.native()
    status = native.decoder_layers(
        stack.native,
        first,
        count,
        ctypes.byref(batch),
        ctypes.byref(pool),
        hidden.data_ptr(),
        None if taps is None else ctypes.byref(taps.native(hidden)),
        None if after is None else ctypes.byref(after),
    )
    if status:
        cpu.check_status(status, "decoder_layers")
    if follower is not None and after is not None:
        follower.done()
    return hidden


def decoder_layer(
    hidden: torch.Tensor, w: DecoderLayerWeight, step: DecoderStep, layer: int
) -> torch.Tensor:
    """`decoder_layers` for a single layer, whose index in the pool is `layer`."""
    return decoder_layers(hidden, stack_layers([w]), step, layer)


def decoder_layer_reference(
    hidden: torch.Tensor, w: DecoderLayerWeight, step: DecoderStep, layer: int
) -> torch.Tensor:
    """Runs one layer as separate operations."""
    q = rope_and_cache(
        linear(
            rms_norm(hidden, w.input_norm, w.eps), w.qkv, lora=addition_to(step.lora, "qkv", layer)
        ),
        step.positions,
        step.cos_sin,
        step.pool,
        layer,
        step.slots,
        step.num_heads,
        step.pool.shape[1],
        w.q_norm,
        w.k_norm,
        w.eps,
    )
    mixed = paged_attention(
        q,
        step.pool,
        layer,
        step.page_table,
        step.cu_q_lens,
        step.kv_lens,
        step.scale,
        step.max_q_len,
        step.max_kv_len,
        window=w.window,
        ancestors=step.ancestors,
    )
    hidden = linear(mixed, w.o, hidden, lora=addition_to(step.lora, "o", layer))
    normed = rms_norm(hidden, w.post_norm, w.eps)
    if isinstance(w.mlp, SparseMlpWeight):
        return w.mlp(normed, hidden, step.lora, layer)
    inner = gate_up_silu(normed, w.mlp.gate_up, addition_to(step.lora, "gate_up", layer))
    return linear(inner, w.mlp.down, hidden, lora=addition_to(step.lora, "down", layer))
