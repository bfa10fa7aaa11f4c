"""The residual stream on a GPU. Additions are fused with the norms that follow them or, for few
rows, with the products around them.
"""

from __future__ import annotations

import torch
from weft.kernels.ops.activation.spec import SILU
from weft.kernels.ops.linear import gpu_fp8 as fp8_linear
from weft.kernels.ops.linear import linear
from weft.kernels.ops.linear.gpu import (
    add_product,
    adds_within,
    gate_up_silu_to_fold,
    linear_to_fold,
    normed_linear,
    supports_norm,
)
from weft.kernels.ops.linear.gpu_fp8 import gated_mlp, has_groups, may_round, rounds_rows
from weft.kernels.ops.linear.spec import LinearWeight, PlainForm
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, empty_rows
from weft.kernels.ops.linear.triton_streamed import MAX_STREAMED_ROWS
from weft.kernels.ops.lora.checks import check_addition
from weft.kernels.ops.lora.spec import LoraAddition, experts_addition
from weft.kernels.ops.lora.triton_fold import MAX_FOLDED_ROWS, Folded
from weft.kernels.ops.moe.gpu import begin_ranks, norm_after, routed_moe
from weft.kernels.ops.moe.spec import ExpertParts, SharedExpert
from weft.kernels.ops.moe.triton_combine import NormAfter
from weft.kernels.ops.moe.triton_direct import joins_shared
from weft.kernels.ops.norm import AnyNorm, Norm
from weft.kernels.ops.norm.triton_rms import add_rms_norm, add_rounding_norm
from weft.kernels.ops.peers.spec import GpuPeers
from weft.kernels.ops.stream.additions import (
    Combine,
    Computed,
    GatedSum,
    Normed,
    Pending,
    SharedCombine,
    Sum,
)
from weft.kernels.ops.stream.reference import Stream
from weft.kernels.ops.stream.taps import Taps
from weft.kernels.shared.formats.quantised import Fp8Experts


class GpuStream(Stream):
    """`Stream` through consecutive layers on a GPU.

    The last addition stays pending until the next norm is asked for, or the stream is settled. For
    few rows the addition's own product adds it, and taps the stream for the next layer
    (`begin_run`); for more rows the kernel of the next norm does.

    Args:
        value: [T, H], contiguous; overwritten.
    """

    def __init__(self, value: torch.Tensor, taps: Taps | None) -> None:
        if not value.is_contiguous():
            raise ValueError("hidden states must be contiguous")
        super().__init__(value, taps)
        self._folds = False
        self._pending: Pending | None = None
        self._entered: int | None = None

    def begin_run(self, folds: bool) -> None:
        if folds != self._folds:
            self.settle()
        self._folds = folds

    def enter(self, layer: int) -> None:
        self._entered = layer

    def normed(self, norm: AnyNorm | None) -> Normed:
        if not isinstance(norm, Norm):
            value = self.settle()
            self._take(None)
            return Normed(value if norm is None else norm(value))
        pending, self._pending = self._pending, None
        are_experts = isinstance(pending, Combine | SharedCombine)
        tap = None if pending is None or are_experts else self._tap()
        if self._folds:
            if pending is not None:
                _add_within(self._value, pending, tap)
            normed: Normed = _NormedByProducts(self._value, norm)
        elif pending is None:
            normed = Normed(norm(self._value))
        else:
            normed = _add_and_norm(self._value, pending, norm, tap)
        self._take(tap)
        return normed

    def add(self, pending: Pending) -> None:
        if self._pending is not None:
            self.settle()
        if isinstance(pending, SharedCombine) and not _joins(pending):
            # The rows are a norm's result, which later additions do not change.
            self._value = pending.shared_sum().added_to(self._value)
            pending = pending.routed
        self._pending = pending

    def computed(self, pending: Pending) -> torch.Tensor:
        if isinstance(pending, SharedCombine):
            return pending.shared_sum().added_to(_combine(pending.routed, None))
        if isinstance(pending, Combine):
            return _combine(pending, None)
        return super().computed(pending)

    def settle(self) -> torch.Tensor:
        pending, self._pending = self._pending, None
        if pending is None:
            return self._value
        if self._folds:
            _add_within(self._value, pending, None)
        elif isinstance(pending, Combine | SharedCombine):
            self._value.add_(_combine(pending, None))
        else:
            self._value = pending.added_to(self._value)
        return self._value

    def _tap(self) -> torch.Tensor | None:
        """Where a kernel can put the stream that enters the last entered layer; None: nowhere, or
        in more than one place.
        """
        if self.taps is None or self._entered is None:
            return None
        places = self.taps.places_of(self._entered)
        return places[0] if len(places) == 1 else None

    def _take(self, tap: torch.Tensor | None) -> None:
        if self.taps is not None and self._entered is not None:
            if tap is None:
                self.taps.take(self._entered, self._value)
            self.taps.have_taken(self._entered)
        self._entered = None


class RankedStream(GpuStream):
    """`Stream` through consecutive layers on GPUs that each hold parts of what is added. One launch
    sums the parts, adds the sum to the stream and computes the norm that follows.

    Args:
        value: [T, H], contiguous; overwritten.
    """

    def __init__(self, value: torch.Tensor, taps: Taps | None, peers: GpuPeers) -> None:
        super().__init__(value, taps)
        self.peers: GpuPeers = peers

    def begin_run(self, folds: bool) -> None:
        """Products of a rank's part cannot add to the stream."""

    def normed(self, norm: AnyNorm | None) -> Normed:
        pending = self._pending
        is_whole = isinstance(pending, Computed) and not pending.is_partial
        if pending is None or is_whole or not isinstance(norm, Norm):
            return super().normed(norm)
        self._pending, tap = None, self._tap()
        normed = self.peers.add_norm(_part(pending), self._value, norm, tap)
        assert normed is not None
        self._take(tap)
        return Normed(normed)

    def add(self, pending: Pending) -> None:
        if isinstance(pending, SharedCombine):
            pending = Computed(_part(pending), is_partial=True)
        super().add(pending)

    def computed(self, pending: Pending) -> torch.Tensor:
        total = torch.zeros_like(self._value)
        self.peers.add_norm(_part(pending), total, None)
        return total

    def settle(self) -> torch.Tensor:
        pending, self._pending = self._pending, None
        if isinstance(pending, Computed) and not pending.is_partial:
            self._value = pending.added_to(self._value)
        elif pending is not None:
            self.peers.add_norm(_part(pending), self._value, None)
        return self._value


def _part(pending: Pending) -> torch.Tensor:
    """[T, H]: this rank's part of an addition."""
    if isinstance(pending, Computed):
        return pending.value
    if isinstance(pending, SharedCombine):
        x, w, lora = pending.shared_sum()
        return linear(x, w, lora=lora).add_(_combine(pending.routed, None))
    if isinstance(pending, Combine):
        return _combine(pending, None)
    if (pending.lora if isinstance(pending, Sum) else pending.to_down) is None:
        return (_product(pending) if isinstance(pending, Sum) else _gated(pending))[0]
    x, w, lora = pending.inner()  # No norm follows that could add what adapters do.
    return linear(x, w, lora=lora)


class _RoundedNormed(Normed):
    """A norm whose rows were also rounded to FP8 in the same launch, for products with FP8
    weights.
    """

    def __init__(self, value: torch.Tensor, rounded: Fp8Rows) -> None:
        super().__init__(value)
        self.rounded = rounded

    def linear(self, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
        rounded = _rounded_for(self, w, lora)
        if rounded is None:
            return super().linear(w, lora)
        return fp8_linear.rounded_linear(rounded, w, self.value.dtype)


def _rounded_for(x: Normed, w: LinearWeight, lora: LoraAddition | None) -> Fp8Rows | None:
    if lora is not None or not isinstance(x, _RoundedNormed) or not rounds_rows(x.rounded.rows, w):
        return None
    return x.rounded if x.rounded.has_groups == has_groups(w) else None


def _rounded_groups(x: Normed) -> Fp8Rows | None:
    """Its rows with scales of groups, as experts take them, if the norm rounded them so."""
    return x.rounded if isinstance(x, _RoundedNormed) and x.rounded.has_groups else None


class _NormedByProducts(Normed):
    """A norm that is computed within the products that read it; valid until the next addition."""

    def __init__(self, value: torch.Tensor, norm: Norm) -> None:
        self._stream, self._norm = value, norm

    def linear(self, w: LinearWeight, lora: LoraAddition | None) -> torch.Tensor:
        return normed_linear(self._stream, *self._norm, w, lora=lora)

    gate_up_silu = linear


def can_fold(
    rows: int,
    first: LinearWeight,
    to_first: LoraAddition | None,
    last: LinearWeight,
    to_last: LoraAddition | None,
) -> bool:
    is_plain = last.data.is_contiguous() and not last.is_fixed
    return is_plain and supports_norm(rows, first, to_first) and adds_within(rows, last, to_last)


def _add_within(value: torch.Tensor, pending: Pending, tap: torch.Tensor | None) -> None:
    assert isinstance(pending, Sum | GatedSum)
    x, w, lora = pending.inner() if isinstance(pending, GatedSum) else pending
    add_product(value, x, w, lora, tap)


def _add_and_norm(
    value: torch.Tensor,
    pending: Pending,
    norm: Norm,
    tap: torch.Tensor | None,
) -> Normed:
    """Except for experts, the sum also goes to `tap`, if given. If the product that is added has a
    weight in FP8, the norm rounds more than a few rows, since the next product usually has a weight
    of the same format.
    """
    if isinstance(pending, Combine | SharedCombine):
        rounded = _rows_after_experts(value, pending)
        normed = _combine(pending, NormAfter(value, *norm, rounded))
        return Normed(normed) if rounded is None else _RoundedNormed(normed, rounded)
    if isinstance(pending, Computed):
        return Normed(add_rms_norm(pending.value, value, *norm, None, tap)[0])
    out, added = _product(pending) if isinstance(pending, Sum) else _gated(pending)
    last = pending.w if isinstance(pending, Sum) else pending.down
    if not may_round(out.shape[0], last):
        return Normed(add_rms_norm(out, value, *norm, added, tap)[0])
    return _RoundedNormed(
        *add_rounding_norm(out, value, *norm, added, tap, has_groups=has_groups(last))
    )


def _rows_after_experts(value: torch.Tensor, pending: Combine | SharedCombine) -> Fp8Rows | None:
    """Where the norm after experts with weights in FP8 blocks also puts its result, rounded for the
    next product, which mostly has the experts' format; None: it takes rows as they are.
    """
    routed = pending.routed if isinstance(pending, SharedCombine) else pending
    experts = routed.w.experts
    first = None if experts.stacked is None or experts.is_fixed else experts.stacked[0]
    rows, hidden = value.shape
    if not isinstance(first, Fp8Experts) or not first.rows or rows <= MAX_STREAMED_ROWS:
        return None
    return empty_rows(rows, hidden, value.device, has_groups=True)


def _product(pending: Sum) -> tuple[torch.Tensor, Folded | None]:
    x, w, lora = pending
    is_plain = isinstance(w.form, PlainForm) and not w.is_fixed
    if lora is None or not is_plain or not 0 < x.shape[0] <= MAX_FOLDED_ROWS:
        return linear(x, w, lora=lora), None
    check_addition((x.shape[0], w.out_features), x.shape, x.dtype, lora)
    return linear_to_fold(x, w, lora)


def _gated(pending: GatedSum) -> tuple[torch.Tensor, Folded | None]:
    x, both, down, to_gate_up, to_down = pending
    rows = x.value.shape[0]
    if to_down is None and rounds_rows(rows, both) and may_round(rows, down):
        rounded = _rounded_for(x, both, to_gate_up)
        return gated_mlp(x.value, both, down, to_gate_up, rounded), None
    is_plain = all(isinstance(w.form, PlainForm) and not w.is_fixed for w in (both, down))
    can_add = 0 < rows <= MAX_FOLDED_ROWS and is_plain
    if to_gate_up is None or to_down is None or not can_add:
        return _product(pending.inner())
    check_addition((rows, both.out_features), x.value.shape, x.value.dtype, to_gate_up)
    check_addition((rows, down.out_features), (rows, down.in_features), x.value.dtype, to_down)
    inner, added = gate_up_silu_to_fold(x.value, both, to_gate_up, to_down)
    if added is None:
        return _product(Sum(inner, down, to_down))
    return linear(inner, down), added


def _joins(pending: SharedCombine) -> bool:
    shared, gate, routed, factor = pending
    if not isinstance(shared, GatedSum) or gate is None or factor != 1.0:
        return False
    weights, w = (shared.gate_up, shared.down, gate), routed.w
    experts, stacked = w.experts, w.experts.stacked or ()
    is_plain = all(
        isinstance(weight.form, PlainForm) and weight.bias is None and not weight.is_fixed
        for weight in weights
    ) and all(isinstance(matrices, torch.Tensor) for matrices in stacked)
    adapters = routed.lora, shared.to_gate_up, shared.to_down
    others = *adapters, experts.biases, experts.placement
    return (
        is_plain
        and not experts.is_fixed
        and not w.form.scales_input
        and experts.gating == SILU
        and all(other is None for other in others)
        and shared.down.in_features == experts.inner_size
        and joins_shared(routed.x.value, w.top_k, experts.inner_size)
    )


def _combine(pending: Combine | SharedCombine, after: NormAfter | None) -> torch.Tensor:
    """With a norm after it, returns the norm's result. Includes a shared expert only if `_joins`
    holds.
    """
    joined = None
    if isinstance(pending, SharedCombine):
        shared, gate, pending, _ = pending
        assert isinstance(shared, GatedSum)
        assert gate is not None
        joined = SharedExpert(shared.gate_up.data, shared.down.data, gate.data)
    if pending.w.form.scales_input or pending.w.exchange is not None:
        total = pending.partial()
        return total if after is None else norm_after(total, after)
    x, w, to_experts = pending.x.value, pending.w, experts_addition(pending.lora, pending.layer)
    experts = w.experts
    assert experts.stacked is not None
    sizes, is_fixed = (experts.num_places, experts.inner_size), experts.is_fixed
    ranks = begin_ranks(x, to_experts, *sizes, is_fixed=is_fixed)
    return routed_moe(
        x,
        pending.router_logits(),
        w.top_k,
        *experts.stacked,
        after,
        to_experts,
        ranks,
        renormalise=w.renormalise,
        form=w.form,
        more=ExpertParts(experts.gating, experts.biases, experts.placement),
        shared=joined,
        is_fixed=is_fixed,
        record=pending.record,
        chosen=pending.chosen,
        rounded=_rounded_groups(pending.x),
    )
