"""What a GPU's kernels do with a finished product: bias, residual, gating, and its store.

A product is [ROWS, COLUMNS], or [COLUMNS, ROWS] where IS_TURNED, which says that the weight was the
first operand.
"""

from __future__ import annotations

import triton
import triton.language as tl
from weft.kernels.ops.activation.triton_activation import silu_and


@triton.jit
def of_columns(values: tl.tensor, IS_TURNED: tl.constexpr) -> tl.tensor:
    """[COLUMNS] along the columns of a product."""
    return values[:, None] if IS_TURNED else values[None, :]


@triton.jit
def of_rows(values: tl.tensor, IS_TURNED: tl.constexpr) -> tl.tensor:
    """[ROWS] along the rows of a product."""
    return values[None, :] if IS_TURNED else values[:, None]


@triton.jit
def residual_of(
    residual: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    rows: int,
    columns: int,
    IS_GATED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[COLUMNS, ROWS] float32 each: what is added to a product, and to the second one where gated.

    Products of few rows load it before they begin, since it would arrive late after them.
    """
    given = tl.zeros([column.shape[0], row.shape[0]], tl.float32)
    given_up = given
    if residual is not None:
        mask = (column < columns)[:, None] & (row < rows)[None, :]
        stride = columns * 2 if IS_GATED else columns
        at = residual + row[None, :].to(tl.int64) * stride + column[:, None]
        given = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if IS_GATED:
            given_up = tl.load(at + columns, mask=mask, other=0.0).to(tl.float32)
    return given, given_up


@triton.jit
def store_product(
    out: tl.tensor,
    product: tl.tensor,
    up: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    before: tl.tuple,
    row: tl.tensor,
    column: tl.tensor,
    rows: int,
    columns: int,
    IS_GATED: tl.constexpr,
    IS_TURNED: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr = False,
    tap: tl.tensor = None,
    tap_stride: int = 0,
) -> None:
    """Adds bias and residual to a product in float32, and stores it; where gated, the activation of
    it and of the second product `up`, both with what is added.

    Args:
        bias: [columns], where gated twice as many, or None.
        residual: As `residual_of` takes it, or None.
        before: From `residual_of`; None: the residual is loaded here, for products without gate.
        ROUNDS_FIRST: Whether the product is rounded before the residual is added.
        tap: Receives the result as well, in rows of `tap_stride`; or None.
    """
    in_out = column < columns
    mask = of_rows(row < rows, IS_TURNED) & of_columns(in_out, IS_TURNED)
    if bias is not None:
        beside = tl.load(bias + column, mask=in_out, other=0.0).to(tl.float32)
        product += of_columns(beside, IS_TURNED)
    if IS_GATED:
        if bias is not None:
            beside = tl.load(bias + columns + column, mask=in_out, other=0.0).to(tl.float32)
            up += of_columns(beside, IS_TURNED)
        if residual is not None:
            product += before[0]
            up += before[1]
        product = silu_and(product, up)
    its_row, its_column = of_rows(row.to(tl.int64), IS_TURNED), of_columns(column, IS_TURNED)
    at = its_row * columns + its_column
    if residual is not None and not IS_GATED:
        if ROUNDS_FIRST:
            product = product.to(residual.dtype.element_ty).to(tl.float32)
        if before is None:
            product += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        else:
            product += before[0]
    tl.store(out + at, product.to(out.dtype.element_ty), mask=mask)
    if tap is not None:
        at = its_row * tap_stride + its_column
        tl.store(tap + at, product.to(tap.dtype.element_ty), mask=mask)
