"""Parts of several kernels of experts: their gating, and reads and writes of their rows."""

from __future__ import annotations

import triton
import triton.language as tl
from weft.kernels.ops.linear.triton_epilogue import of_columns, of_rows


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, GATING: tl.constexpr) -> tl.tensor:
    """`weft.kernels.ops.activation.spec.Gating.in_kernels` of both, in float32."""
    if GATING.gate_limit is not None:
        gate = tl.minimum(gate, GATING.gate_limit)
    if GATING.limit is not None:
        up = tl.maximum(tl.minimum(up, GATING.limit), -GATING.limit)
    if GATING.offset != 0.0:
        up += GATING.offset
    if GATING.cubic != 0.0:
        slope = gate * (GATING.alpha + GATING.cubic * gate * gate)
    elif GATING.alpha != 1.0:
        slope = GATING.alpha * gate
    else:
        slope = gate
    return gate / (1.0 + tl.exp(-slope)) * up


@triton.jit
def once(at: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Loads elements that are not read again, so that they need not be cached."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def store_inner(
    inner: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    added: tl.tensor,
    bias: tl.tensor,
    pair: tl.tensor,
    column: tl.tensor,
    width: int,
    GATING: tl.constexpr,
) -> None:
    """Writes gate and up of a pair's column, combined, with biases and what adapters add."""
    if bias is not None:
        gate += tl.load(bias + column).to(tl.float32)
        up += tl.load(bias + width + column).to(tl.float32)
    if added is not None:
        added_at = added + pair * 2 * width + column
        gate += tl.load(added_at).to(tl.float32)
        up += tl.load(added_at + width).to(tl.float32)
    product = gated(gate, up, GATING)
    tl.store(inner + pair * width + column, product.to(inner.dtype.element_ty))


@triton.jit
def with_row_parts(
    result: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    ids: tl.tensor,
    shares: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    mask: tl.tensor,
    hidden: int,
    experts: int,
    TOP_K: tl.constexpr,
    IS_SHARE: tl.constexpr,
) -> tl.tensor:
    """Some columns of a row's sum over its experts, plus the experts' biases and the residual, if
    given.
    """
    if bias is not None:
        for place in range(TOP_K):
            expert = tl.load(ids + row * TOP_K + place).to(tl.int64)
            has_bias = mask
            if IS_SHARE:
                has_bias = column < tl.where(expert < experts, hidden, 0)
            given = tl.load(bias + expert * hidden + column, mask=has_bias, other=0.0)
            result += tl.load(shares + row * TOP_K + place) * given.to(tl.float32)
    if residual is not None:
        result += tl.load(residual + row * hidden + column, mask=mask, other=0.0).to(tl.float32)
    return result


@triton.jit
def store_pairs(
    out: tl.tensor,
    product: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    shares: tl.tensor,
    pair: tl.tensor,
    is_pair: tl.tensor,
    column: tl.tensor,
    columns: int,
    of_expert: tl.tensor,
    GATING: tl.constexpr,
    IS_GATED: tl.constexpr,
    IS_RAW: tl.constexpr,
    IS_TURNED: tl.constexpr,
) -> None:
    """Stores products with an expert's weight, in rows `pair` of `out`.

    Args:
        product: [ROWS, COLUMNS] float32, or [COLUMNS, ROWS] where IS_TURNED.
        up: The second product of a gated pair.
        bias: Of all experts, or None; that of this one begins at `of_expert`.
        residual: [P, N], of a gated pair added before the activation; or None.
        shares: [P] float32: factors on products without gate; or None.
        GATING: Of a gated pair. With IS_RAW its products are written side by side instead.
    """
    mask = of_rows(is_pair, IS_TURNED) & of_columns(column < columns, IS_TURNED)
    its_row, its_column = of_rows(pair, IS_TURNED), of_columns(column, IS_TURNED)
    if bias is not None:
        at_bias = bias + of_expert + tl.minimum(column, columns - 1)
        product += of_columns(tl.load(at_bias).to(tl.float32), IS_TURNED)
        if IS_GATED:
            up += of_columns(tl.load(at_bias + columns).to(tl.float32), IS_TURNED)
    at = its_row * columns + its_column
    if IS_RAW:
        at = its_row * (2 * columns) + its_column
        tl.store(out + at + columns, up.to(out.dtype.element_ty), mask=mask)
    elif IS_GATED:
        if residual is not None:
            beside = residual + its_row * (2 * columns) + its_column
            product += tl.load(beside, mask=mask, other=0.0).to(tl.float32)
            up += tl.load(beside + columns, mask=mask, other=0.0).to(tl.float32)
        product = gated(product, up, GATING)
    elif shares is not None:
        product *= of_rows(tl.load(shares + pair, mask=is_pair, other=0.0), IS_TURNED)
    elif residual is not None:
        product += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)
