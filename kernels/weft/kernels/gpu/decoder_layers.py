"""A stack of decoder layers on a GPU: additions to the stream are fused with the norms, or, of few
rows, with the products around them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from weft.kernels.attention import check_attention
from weft.kernels.decoder_layer import GatedMlpWeight
from weft.kernels.gpu import flash_attention
from weft.kernels.gpu.attention import are_few_rows, paged_attention
from weft.kernels.gpu.decode_attention import MAX_FEW_ROWS
from weft.kernels.gpu.extend_attention import OwnKv, PromptRows
from weft.kernels.gpu.linear import (
    add_product,
    adds_within,
    gate_up_silu_to_fold,
    linear_to_fold,
    normed_linear,
    takes_norm,
)
from weft.kernels.gpu.lora_fold import MAX_FOLDED_ROWS, Folded
from weft.kernels.gpu.moe import begin_ranks, routed_moe
from weft.kernels.gpu.moe_combine import NormAfter
from weft.kernels.gpu.norm import add_rms_norm, rms_norm
from weft.kernels.gpu.rope import rope_and_cache
from weft.kernels.linear import gate_up_silu, linear
from weft.kernels.lora import addition_to, check_addition, experts_addition
from weft.kernels.rope import check_rope

if TYPE_CHECKING:
    from weft.kernels.decoder_layer import (
        DecoderLayerWeight,
        DecoderStep,
        SparseMlpWeight,
        Taps,
    )
    from weft.kernels.linear import LinearWeight
    from weft.kernels.lora import Group, LoraAddition, LoraStep

_GROUPS: tuple[Group, ...] = ("qkv", "o", "gate_up", "down")


def decoder_layers(
    hidden: torch.Tensor,
    layers: Sequence[DecoderLayerWeight],
    step: DecoderStep,
    first: int,
    taps: Taps | None = None,
) -> torch.Tensor:
    """`weft.kernels.decoder_layer.decoder_layers` for CUDA tensors; `hidden` is overwritten.

    A launch that is not dependent, as that which makes `hidden` of an embedding, must be behind all
    that fills `step` and the pool: layers read ahead what earlier steps have left there.
    """
    _check(hidden, layers, step, first)
    if _take_norms(hidden.shape[0], layers[0], step, first):
        return _layers_of_few_rows(hidden, layers, step, first, taps)
    x = rms_norm(hidden, layers[0].input_norm, layers[0].eps)
    prompts = None
    if step.is_cold and flash_attention.takes(hidden.dtype, step.pool.shape[5], hidden.shape[0]):
        prompts = flash_attention.prompt_rows(step.cu_q_lens, hidden.shape[0])
    tap = None
    for index, w in enumerate(layers):
        layer = first + index
        if taps is not None:
            _take(taps, layer, hidden, tap)
        qkv = linear(x, w.qkv, lora=addition_to(step.lora, "qkv", layer))
        mixed = _attend(qkv, w, step, layer, prompts)
        out, added = _product(mixed, w.o, addition_to(step.lora, "o", layer))
        normed, _ = add_rms_norm(out, hidden, w.post_norm, w.eps, added)
        after = None
        if index + 1 < len(layers):
            following = layers[index + 1]
            after = NormAfter(hidden, following.input_norm, following.eps)
        has_tap = after is not None and isinstance(w.mlp, GatedMlpWeight)
        tap = _tap_of(taps, layer + 1) if has_tap else None
        x = _mlp(normed, w.mlp, hidden, after, step.lora, layer, tap)
    return x


def _take_norms(rows: int, w: DecoderLayerWeight, step: DecoderStep, layer: int) -> bool:
    """Whether products take the norms before them, and products before norms add to the stream:
    two launches a layer less.
    """
    if not isinstance(w.mlp, GatedMlpWeight):
        return False
    parts = (w.o, w.mlp.down)
    is_plain = all(part.data.is_contiguous() and not part.is_fixed for part in parts)
    to_qkv, to_o, to_gate_up, to_down = (addition_to(step.lora, group, layer) for group in _GROUPS)
    return (
        is_plain
        and takes_norm(rows, w.qkv, to_qkv)
        and takes_norm(rows, w.mlp.gate_up, to_gate_up)
        and adds_within(rows, w.o, to_o)
        and adds_within(rows, w.mlp.down, to_down)
    )


def _layers_of_few_rows(
    hidden: torch.Tensor,
    layers: Sequence[DecoderLayerWeight],
    step: DecoderStep,
    first: int,
    taps: Taps | None,
) -> torch.Tensor:
    """`decoder_layers` of rows for which `_take_norms` holds."""
    tap = None
    for index, w in enumerate(layers):
        layer = first + index
        if taps is not None:
            _take(taps, layer, hidden, tap)
        to_qkv, to_o, to_gate_up, to_down = (
            addition_to(step.lora, group, layer) for group in _GROUPS
        )
        qkv = normed_linear(hidden, w.input_norm, w.eps, w.qkv, lora=to_qkv)
        add_product(hidden, _attend(qkv, w, step, layer), w.o, to_o)
        assert isinstance(w.mlp, GatedMlpWeight)
        inner = normed_linear(hidden, w.post_norm, w.eps, w.mlp.gate_up, lora=to_gate_up)
        tap = _tap_of(taps, layer + 1) if index + 1 < len(layers) else None
        add_product(hidden, inner, w.mlp.down, to_down, tap)
    return hidden


def _take(taps: Taps, layer: int, hidden: torch.Tensor, tap: torch.Tensor | None) -> None:
    """Takes what enters `layer`, unless the kernel before put it to `tap`."""
    if tap is None:
        taps.take(layer, hidden)
    taps.have_taken(layer)


def _tap_of(taps: Taps | None, layer: int) -> torch.Tensor | None:
    """Where the norm before `layer` puts what enters it; None: nowhere, or not by itself."""
    places = [] if taps is None else taps.places_of(layer)
    return places[0] if len(places) == 1 else None


def _product(
    x: torch.Tensor, w: LinearWeight, lora: LoraAddition | None
) -> tuple[torch.Tensor, Folded | None]:
    """The product, and what adapters still add to it, for the norm that follows."""
    if lora is None or w.is_fixed or not 0 < x.shape[0] <= MAX_FOLDED_ROWS:
        return linear(x, w, lora=lora), None
    check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    return linear_to_fold(x, w.data, w.bias, lora)


def _gated_mlp(
    x: torch.Tensor, w: GatedMlpWeight, lora: LoraStep | None, layer: int
) -> tuple[torch.Tensor, Folded | None]:
    """The MLP's result, and what adapters still add to it, for the norm that follows."""
    to_gate_up, to_down = addition_to(lora, "gate_up", layer), addition_to(lora, "down", layer)
    rows, both, down = x.shape[0], w.gate_up, w.down
    can_fold = 0 < rows <= MAX_FOLDED_ROWS and not (both.is_fixed or down.is_fixed)
    if to_gate_up is None or to_down is None or not can_fold:
        return _product(gate_up_silu(x, both, to_gate_up), down, to_down)
    check_addition((rows, both.out_features), x.shape, x.dtype, to_gate_up)
    check_addition((rows, down.out_features), (rows, down.in_features), x.dtype, to_down)
    inner, added = gate_up_silu_to_fold(x, both.data, both.bias, to_gate_up, to_down)
    return (linear(inner, down), added) if added is not None else _product(inner, down, to_down)


def _attend(
    qkv: torch.Tensor,
    w: DecoderLayerWeight,
    step: DecoderStep,
    layer: int,
    prompts: PromptRows | None = None,
) -> torch.Tensor:
    """Stores K and V, returns what each row's heads take from what it sees: [T, Hq * D].

    The embedding's rows are taken by a launch that is not dependent, behind all that fills `step`.
    """
    rows, kv_heads, dim = qkv.shape[0], step.pool.shape[1], step.pool.shape[5]
    own, is_fixed, max_q_len = None, w.qkv.is_fixed, step.max_q_len
    is_few = are_few_rows(qkv.dtype, max_q_len, step.page_table.shape[0])
    if step.ancestors is not None:
        is_few = max_q_len <= MAX_FEW_ROWS
    if max_q_len > 1 and not (is_fixed or is_few):
        k = torch.empty((rows, kv_heads, dim), dtype=qkv.dtype, device=qkv.device)
        v = qkv.view(rows, -1, dim)[:, step.num_heads + kv_heads :]
        own = OwnKv(k, v, prompts)
    q = rope_and_cache(
        qkv,
        step.positions,
        step.cos_sin,
        step.pool,
        layer,
        step.slots,
        step.num_heads,
        w.q_norm,
        w.k_norm,
        w.eps,
        None if own is None else own.k,
        is_settled=True,
    )
    return paged_attention(
        q,
        step.pool,
        layer,
        step.page_table,
        step.cu_q_lens,
        step.kv_lens,
        step.scale,
        step.max_q_len,
        step.max_kv_len,
        own,
        window=w.window,
        is_fixed=is_fixed,
        ancestors=step.ancestors,
        is_settled=True,
    )


def _mlp(
    x: torch.Tensor,
    w: GatedMlpWeight | SparseMlpWeight,
    hidden: torch.Tensor,
    after: NormAfter | None,
    lora: LoraStep | None,
    layer: int,
    tap: torch.Tensor | None,
) -> torch.Tensor:
    """Computes the residual stream `hidden` with what the MLP adds to it; if a norm follows, leaves
    that there and returns the norm's result. `tap`, if given, gets the sum too: of a gated MLP.
    """
    if isinstance(w, GatedMlpWeight):
        if after is None:
            inner = gate_up_silu(x, w.gate_up, addition_to(lora, "gate_up", layer))
            return linear(inner, w.down, hidden, lora=addition_to(lora, "down", layer))
        out, added = _gated_mlp(x, w, lora, layer)
        return add_rms_norm(out, *after, added, tap)[0]
    experts, to_experts = w.experts, experts_addition(lora, layer)
    assert experts.stacked is not None
    sizes, is_fixed = (experts.num_experts, experts.inner_size), experts.is_fixed
    ranks = begin_ranks(x, to_experts, *sizes, is_fixed=is_fixed)
    out = routed_moe(
        x,
        linear(x, w.router, out_dtype=torch.float32, lora=addition_to(lora, "router", layer)),
        w.top_k,
        *experts.stacked,
        after,
        to_experts,
        ranks,
        renormalise=w.renormalise,
        is_fixed=is_fixed,
    )
    return hidden.add_(out) if after is None else out


def _check(
    hidden: torch.Tensor, layers: Sequence[DecoderLayerWeight], step: DecoderStep, first: int
) -> None:
    """Checks the inputs, once for all layers, which have the same shapes."""
    rows, dtype, pool = hidden.shape[0], hidden.dtype, step.pool
    qkv_shape = (rows, layers[0].qkv.out_features)
    heads = (step.num_heads, pool.shape[1])
    check_rope(qkv_shape, dtype, step.positions, step.cos_sin, pool, step.slots, heads)
    q_shape = (rows, step.num_heads, pool.shape[5])
    check_attention(q_shape, dtype, pool, step.page_table, step.cu_q_lens, step.kv_lens)
    if not hidden.is_contiguous():
        raise ValueError("hidden states must be contiguous")
    if not 0 <= first <= pool.shape[2] - len(layers):
        raise ValueError(
            f"layers {first} to {first + len(layers) - 1} of a pool with {pool.shape[2]}"
        )
