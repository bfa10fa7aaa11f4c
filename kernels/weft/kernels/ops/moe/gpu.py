"""The experts of a mixture on a GPU.

Few rows go to `triton_direct` or `triton_direct_fp8`, and with weights of 4 bits to
`linear.triton_groups_few_rows`. For more rows, pairs of a row and an expert are sorted by expert
and cut into blocks, which are multiplied by their experts' weights (`triton_products`, or
`triton_rounded`). No pair is dropped, and a row's experts are summed in order, so that results
repeat.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from weft.kernels.ops.activation.spec import SILU
from weft.kernels.ops.linear.triton_fp8_rows import Fp8Rows, quantise_rows
from weft.kernels.ops.linear.triton_groups_few_rows import PairExperts, is_in_fours, multiply_few
from weft.kernels.ops.lora.spec import ExpertAddition
from weft.kernels.ops.moe.reference import placed
from weft.kernels.ops.moe.spec import (
    PLAIN_EXPERTS,
    SOFTMAX,
    ExpertParts,
    RouterForm,
    SharedExpert,
    StackedWeight,
)
from weft.kernels.ops.moe.tiles import (
    FIXED_FP8,
    Tiles,
    fp8_tiles,
    packed_tiles,
    rounded_tiles,
    tiles_for,
)
from weft.kernels.ops.moe.triton_combine import NormAfter, combine
from weft.kernels.ops.moe.triton_direct import MAX_DIRECT_ROWS, direct_moe
from weft.kernels.ops.moe.triton_direct_fp8 import can_multiply, direct_fp8_moe
from weft.kernels.ops.moe.triton_lora import down_additions, gate_up_additions
from weft.kernels.ops.moe.triton_lora_pairs import Folded, activate_pairs, can_pair
from weft.kernels.ops.moe.triton_lora_tiles import (
    can_tile,
    expand_items,
    pairs_of,
    shrink_items,
    tokens_of,
)
from weft.kernels.ops.moe.triton_products import multiply_sorted
from weft.kernels.ops.moe.triton_rounded import (
    can_multiply_rounded,
    down_rounded,
    gate_up_rounded,
)
from weft.kernels.ops.moe.triton_route import is_sorted_at_once, route, route_and_sort
from weft.kernels.ops.moe.triton_sort import Blocks, sort_pairs
from weft.kernels.ops.norm.triton_rms import add_rms_norm
from weft.kernels.ops.routes import RouteRecord, record_routes
from weft.kernels.shared.dependent_launch import LaunchOptions, launch_options
from weft.kernels.shared.formats.packed_groups import PackedExperts
from weft.kernels.shared.formats.quantised import Fp8Experts
from weft.kernels.shared.side_stream import SideStreamWork, is_forking

MAX_DIRECT_FP8_ROWS = 3
"""Most rows for which pairs of FP8 weights in blocks, without adapters, are not sorted. On an H200
4 rows of Qwen3-30B-A3B take 50 us sorted and 53 us unsorted, 3 rows 49 and 42 us (`python
bench/gpu_expert_launches.py --only forms --formats fp8`).
"""
MAX_PACKED_ROWS = 4
"""Most rows for which each pair is multiplied separately by its expert's weights of 4 bits."""
MAX_FORKED_ROWS = 256
"""Most rows for which the low-rank additions run concurrently with the products, which leave parts
of the GPU idle.
"""
MAX_PAIRED_ROWS = 256
"""Most rows whose low-rank additions are computed pair by pair between the products."""

TokenRanks = SideStreamWork[torch.Tensor]
"""Each token's ranks for gate and up if all experts share A, computed concurrently with the
router.
"""


class _Sorted(NamedTuple):
    """Products of pairs of a row and its expert, sorted by expert and weighted by the router, with
    what the sum over experts still has to add.
    """

    products: torch.Tensor
    """[T * k, H]."""
    added: torch.Tensor | None
    """[T, H] or [T * k, H]."""
    folded: Folded | None
    options: LaunchOptions
    """Options of the launch that sums them."""


def recorded_route(
    logits: torch.Tensor,
    top_k: int,
    renormalise: bool,
    form: RouterForm,
    placement: torch.Tensor | None,
    record: RouteRecord | None,
    chosen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weft.kernels.ops.moe.route` for CUDA tensors: ids [T, k] int32 and shares [T, k] float32."""
    if record is None:
        return route(logits, top_k, renormalise, form, placement, chosen)
    ids, shares = route(logits, top_k, renormalise, form, chosen=chosen)
    record_routes(record, ids)
    return placed(ids, placement), shares


def begin_ranks(
    x: torch.Tensor, lora: ExpertAddition | None, places: int, inner: int, *, is_fixed: bool
) -> TokenRanks | None:
    """Starts computing the ranks that do not depend on the router; they are complete when the
    router is.

    Args:
        x: [T, H], contiguous, the experts' input.
        places: `weft.kernels.ops.moe.spec.ExpertWeights.num_places`.
        inner: I.

    Returns:
        Work for `routed_moe`; None if there are no such ranks.
    """
    if lora is None or not _is_paired(lora, x.shape[0], inner, is_fixed=is_fixed):
        return None
    if not all(part.is_a_shared for part in lora.w13):
        return None
    parts, layer, tokens = lora.w13, lora.layer, tokens_of(lora.token_slots, places)
    options = launch_options(x.device, is_alone=is_forking(x.device))
    return SideStreamWork(x.device, lambda: shrink_items(x, parts, layer, tokens, options))


def _is_paired(lora: ExpertAddition, rows: int, inner: int, *, is_fixed: bool) -> bool:
    is_few = MAX_DIRECT_ROWS < rows <= MAX_PAIRED_ROWS
    return is_few and not is_fixed and can_pair(lora, inner)


def routed_moe(
    x: torch.Tensor,
    logits: torch.Tensor,
    top_k: int,
    w13: StackedWeight,
    w2: StackedWeight,
    after: NormAfter | None,
    lora: ExpertAddition | None = None,
    ranks: TokenRanks | None = None,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    more: ExpertParts = PLAIN_EXPERTS,
    shared: SharedExpert | None = None,
    is_fixed: bool = False,
    record: RouteRecord | None = None,
    chosen: torch.Tensor | None = None,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """Routing and `moe` of a layer, with the norm that follows it, in as few launches as possible.

    Args:
        logits: [T, E] float32, of the router; of the experts of all ranks.
        w13: [E, 2 * I, H].
        w2: [E, H, I].
        ranks: From `begin_ranks` of the same arguments.
        shared: Shared expert that is added too, where `moe_direct.joins_shared` holds, with the
            requirements of `direct_moe`.
        record: Where the rows' experts are written too.
        chosen: As in `weft.kernels.ops.moe.route`.
        rounded: The rows of x with scales of groups, if they have been rounded already.

    Returns:
        [T, H]: the sum of each row's experts, or with `after` the norm's result.
    """
    rows, experts = x.shape[0], w2.shape[0]
    routes = renormalise, form, more.placement, record, chosen
    if _is_direct(rows, w13, lora) or is_fixed:
        # Squares are added in one order only if one kernel computes all norms.
        routed = recorded_route(logits, top_k, *routes)
        if shared is None:
            out = moe(x, *routed, w13, w2, None, lora, more, is_fixed=is_fixed)
        else:
            assert not isinstance(w13, PackedExperts)
            assert not isinstance(w2, PackedExperts)
            out = direct_moe(x, *routed, w13, w2, None, None, more, shared)
        return out if after is None else norm_after(out, after)
    if lora is None and _is_few_packed(x, w13, w2):
        routed = recorded_route(logits, top_k, *routes)
        return _few_packed(x, *routed, w13, w2, None, after, more)
    tiles, blocks = _tiles(x, top_k, w13, w2, lora, more), None
    is_alone = form.jitter is None and record is None
    if is_alone and is_sorted_at_once(rows, logits.shape[1]):
        ids, shares, blocks = route_and_sort(
            logits, top_k, tiles.rows, renormalise=renormalise, form=form,
            placement=more.placement, own=experts, chosen=chosen,
        )  # fmt: skip
    else:
        ids, shares = recorded_route(logits, top_k, *routes)
    return sorted_moe(
        x, ids, shares, w13, w2, None, tiles, lora, ranks, blocks=blocks, after=after, more=more,
        rounded=rounded,
    )  # fmt: skip


def norm_after(x: torch.Tensor, after: NormAfter) -> torch.Tensor:
    """Adds x to the stream, and computes the norm of the sum."""
    stream, weight, eps, rounded = after
    return add_rms_norm(x, stream, weight, eps, rounded=rounded)[0]


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    residual: torch.Tensor | None,
    lora: ExpertAddition | None = None,
    more: ExpertParts = PLAIN_EXPERTS,
    *,
    is_fixed: bool = False,
) -> torch.Tensor:
    """`weft.kernels.ops.moe.moe` for CUDA tensors.

    Args:
        x: [T, H], contiguous, T at least 1.
        ids: [T, k] int32, each below E; if `more` says that experts are a share, also E, for
            experts of other ranks.
        shares: [T, k] float32.
        w13: [E, 2 * I, H], rows of gate first.
        w2: [E, H, I].
        residual: [T, H] or None.
        lora: What adapters add, or None; only with PLAIN_EXPERTS.
        is_fixed: Whether a row's result must not depend on the other rows. Each element is then one
            chain of tensor core instructions over K, the same for all tiles, and a residual is
            added to the rounded sum, as a following norm does.
    """
    if _is_direct(x.shape[0], w13, lora) and not is_fixed:
        assert not isinstance(w13, PackedExperts)
        assert not isinstance(w2, PackedExperts)
        if (
            isinstance(w13, Fp8Experts)
            and isinstance(w2, Fp8Experts)
            and lora is None
            and can_multiply(x, ids.shape[1], w13, w2, more)
        ):
            return direct_fp8_moe(x, ids, shares, w13, w2, residual, more)
        return direct_moe(x, ids, shares, w13, w2, residual, lora, more)
    if lora is None and not is_fixed and _is_few_packed(x, w13, w2):
        return _few_packed(x, ids, shares, w13, w2, residual, None, more)
    experts, _, inner = w2.shape
    ranks = begin_ranks(x, lora, experts + more.is_share, inner, is_fixed=is_fixed)
    if is_fixed and any(isinstance(weight, Fp8Experts) for weight in (w13, w2)):
        tiles = FIXED_FP8
    else:
        tiles = _tiles(x, ids.shape[1], w13, w2, lora, more)
    return sorted_moe(
        x, ids, shares, w13, w2, residual, tiles, lora, ranks, is_fixed=is_fixed, more=more
    )


def _is_direct(rows: int, w13: StackedWeight, lora: ExpertAddition | None) -> bool:
    if isinstance(w13, Fp8Experts) and w13.rows and lora is None:
        return rows <= MAX_DIRECT_FP8_ROWS
    return rows <= MAX_DIRECT_ROWS and not isinstance(w13, PackedExperts)


def _is_few_packed(x: torch.Tensor, w13: StackedWeight, w2: StackedWeight) -> bool:
    return (
        isinstance(w13, PackedExperts)
        and isinstance(w2, PackedExperts)
        and x.shape[0] <= MAX_PACKED_ROWS
        and is_in_fours(x.shape[1], x.dtype)
        and is_in_fours(w2.shape[2], x.dtype)
    )


def _few_packed(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    residual: torch.Tensor | None,
    after: NormAfter | None,
    more: ExpertParts,
) -> torch.Tensor:
    assert isinstance(w13, PackedExperts)
    assert isinstance(w2, PackedExperts)
    (hidden, width), (pairs, top_k) = w2.shape[1:], (ids.numel(), ids.shape[1])
    inner = torch.empty((pairs, width), dtype=x.dtype, device=x.device)
    products = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    experts = PairExperts(ids, None, top_k, more)
    multiply_few(inner, x, w13, bias=more.gate_up_bias, is_gated=True, experts=experts)
    experts = PairExperts(ids, shares, 1, more, is_settled=True)
    multiply_few(products, inner, w2, bias=more.down_bias, experts=experts)
    found = _Sorted(products, None, None, launch_options(x.device))
    share = None if more.placement is None else (ids, w2.shape[0])
    return combine(*found, top_k, residual, after, is_fixed=False, share=share)


def _tiles(
    x: torch.Tensor,
    top_k: int,
    w13: StackedWeight,
    w2: StackedWeight,
    lora: ExpertAddition | None,
    more: ExpertParts,
) -> Tiles:
    rows, (experts, hidden, width) = x.shape[0], w2.shape
    experts = more.num_routed(experts)
    if isinstance(w2, PackedExperts):
        is_nvfp4 = w2.first.factors is not None
        return packed_tiles(rows * top_k, experts, is_plain=lora is None, is_nvfp4=is_nvfp4)
    if lora is None and can_multiply_rounded(x, w13, w2, more):
        tiles = rounded_tiles(rows * top_k, experts)
        if tiles is not None:
            return tiles
    if isinstance(w2, Fp8Experts) and w2.rows and x.element_size() == 2:
        return fp8_tiles(rows * top_k, experts)
    return tiles_for(rows, top_k, experts, hidden, width)


def sorted_moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    residual: torch.Tensor | None,
    tiles: Tiles,
    lora: ExpertAddition | None = None,
    ranks: TokenRanks | None = None,
    *,
    blocks: Blocks | None = None,
    after: NormAfter | None = None,
    is_fixed: bool = False,
    more: ExpertParts = PLAIN_EXPERTS,
    rounded: Fp8Rows | None = None,
) -> torch.Tensor:
    """`moe` over pairs sorted by expert, cut as `tiles` says.

    Args:
        blocks: The pairs in blocks of `tiles.rows`, if they have been sorted already.
        after: The norm that follows, whose result is then returned, or None; not with `residual`.
        rounded: As in `routed_moe`.
    """
    rows, (experts, _, inner) = x.shape[0], w2.shape
    blocks = blocks or sort_pairs(ids, experts, tiles.rows)
    given = (x, ids, shares, w13, w2, tiles, blocks)
    if tiles.is_rounded:
        found = _rounded(*given, more, rounded)
    elif lora is not None and _is_paired(lora, rows, inner, is_fixed=is_fixed):
        if more.biases is not None or more.gating != SILU:
            raise ValueError("adapters of experts with biases or another gating are not supported")
        found = _paired(*given, lora, ranks, rounded, is_share=more.is_share)
    else:
        found = _in_turn(*given, lora, more, rounded, is_fixed=is_fixed)
    share = None if more.placement is None else (ids, experts)
    return combine(*found, ids.shape[1], residual, after, is_fixed=is_fixed, share=share)


def _rounded(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    tiles: Tiles,
    blocks: Blocks,
    more: ExpertParts,
    rounded: Fp8Rows | None,
) -> _Sorted:
    """For what `can_multiply_rounded` accepts."""
    assert isinstance(w13, Fp8Experts)
    assert isinstance(w2, Fp8Experts)
    options = launch_options(x.device)
    rounded = quantise_rows(x, has_groups=True) if rounded is None else rounded
    inner = gate_up_rounded(
        rounded, w13, blocks, tiles.rows, tiles.up, ids.shape[1], options, x.dtype, more
    )
    if isinstance(inner, torch.Tensor):
        inner = quantise_rows(inner, has_groups=True)
    products = down_rounded(
        inner, w2, shares, blocks, tiles.rows, tiles.down, options, x.dtype, more
    )
    return _Sorted(products, None, None, options)


def _in_turn(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    tiles: Tiles,
    blocks: Blocks,
    lora: ExpertAddition | None,
    more: ExpertParts,
    rounded: Fp8Rows | None,
    *,
    is_fixed: bool,
) -> _Sorted:
    (rows, hidden), (experts, _, width), top_k = x.shape, w2.shape, ids.shape[1]
    pairs = ids.numel()
    options, device = launch_options(x.device), x.device
    forked = launch_options(device, is_alone=is_forking(device))
    to_gate_up = to_down = added = added_down = None
    if lora is not None:
        given, is_few = (experts, lora, forked), rows <= MAX_FORKED_ROWS
        items = None
        if not is_fixed and can_tile((*lora.w13, *lora.w2)):
            numbers = experts, experts + more.is_share
            items = pairs_of(lora.token_slots, ids, *numbers, blocks, tiles.rows)
        to_gate_up = SideStreamWork(
            device,
            lambda: gate_up_additions(
                x, ids, width, *given, items, is_fixed=is_fixed, is_share=more.is_share
            ),
            is_forked=is_few,
        )
    inner = torch.empty((pairs, width), dtype=x.dtype, device=device)
    products = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    joined = options if lora is None else forked
    if to_gate_up is not None:
        added = to_gate_up.join()
    multiply_sorted(
        inner, x, w13, shares, blocks, added, tiles, top_k, joined, is_gated=True,
        is_fixed=is_fixed, more=more, rounded=rounded,
    )  # fmt: skip
    if lora is not None:
        to_down = SideStreamWork(
            device,
            lambda: down_additions(
                inner,
                ids,
                shares,
                hidden,
                *given,
                items=items,
                is_fixed=is_fixed,
                is_share=more.is_share,
            ),
            is_forked=is_few,
        )
    multiply_sorted(
        products, inner, w2, shares, blocks, None, tiles, 1, options, is_gated=False,
        is_fixed=is_fixed, more=more,
    )  # fmt: skip
    if to_down is not None:
        added_down = to_down.join()
    return _Sorted(products, added_down, None, joined)


def _paired(
    x: torch.Tensor,
    ids: torch.Tensor,
    shares: torch.Tensor,
    w13: StackedWeight,
    w2: StackedWeight,
    tiles: Tiles,
    blocks: Blocks,
    lora: ExpertAddition,
    ranks: TokenRanks | None,
    rounded: Fp8Rows | None,
    *,
    is_share: bool,
) -> _Sorted:
    """`ranks` are given if experts share A; otherwise each pair's ranks are computed concurrently
    with the first product.
    """
    hidden, (experts, _, width), top_k = x.shape[1], w2.shape, ids.shape[1]
    pairs, device = ids.numel(), x.device
    options, alone = launch_options(device), launch_options(device, is_alone=True)
    forked = launch_options(device, is_alone=is_forking(device))
    places = experts + is_share
    items = pairs_of(lora.token_slots, ids, experts, places, blocks, tiles.rows)
    both = torch.empty((pairs, 2 * width), dtype=torch.float32, device=device)
    products = torch.empty((pairs, hidden), dtype=x.dtype, device=device)
    # The activation reads slots, experts and ranks before its wait. All of them are complete before
    # the first of these launches with `is_alone` begins.
    if ranks is not None:
        given, activation = ranks.join(), options
        multiply_sorted(
            both, x, w13, shares, blocks, None, tiles, top_k, alone, is_gated=True, is_raw=True,
            rounded=rounded,
        )  # fmt: skip
    else:
        parts, layer = lora.w13, lora.layer
        work = SideStreamWork(device, lambda: shrink_items(x, parts, layer, items, forked, top_k))
        multiply_sorted(
            both, x, w13, shares, blocks, None, tiles, top_k, options, is_gated=True, is_raw=True,
            rounded=rounded,
        )  # fmt: skip
        activation, given = alone, work.join()
    inner, to_down = activate_pairs(
        both, given, ids, shares, lora, experts, activation, is_share=is_share
    )
    if to_down is None or lora.w2[0].is_b_shared:
        multiply_sorted(
            products, inner, w2, shares, blocks, None, tiles, 1, options, is_gated=False
        )
        folded = None
        if to_down is not None:
            folded = Folded(to_down, lora.w2[0], lora.token_slots, places, lora.layer)
        return _Sorted(products, None, folded, options)

    def expand() -> torch.Tensor:
        added, (found, sums) = torch.empty_like(products), to_down
        expand_items(added, found, lora.w2, lora.layer, items, forked, summed=sums)
        return added

    expanded = SideStreamWork(device, expand)
    multiply_sorted(products, inner, w2, shares, blocks, None, tiles, 1, options, is_gated=False)
    return _Sorted(products, expanded.join(), None, forked)
