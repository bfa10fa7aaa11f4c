"""Tiles of rows that belong to one request each; only the device knows how many rows a
request has.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def several_rows(
    index: tl.tensor,
    cu_q_lens: tl.tensor,
    requests: int,
    first: tl.tensor,
    most: int,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The tile of a program among those of the requests that may bring several rows, and its
    request. `first` is None or [1] int32 and begins `most` such requests.
    """
    low = 0
    high = requests
    if first is not None:
        low = tl.load(first)
        high = tl.minimum(low + most, requests)
        index += tl.load(cu_q_lens + low) // ROWS + low
    return index, _request_within(index, cu_q_lens, low, high, ROWS)


@triton.jit
def request_of_tile(
    index: tl.tensor, cu_q_lens: tl.tensor, requests: int, ROWS: tl.constexpr
) -> tl.tensor:
    """The last request whose first tile, cu_q_lens[r] // ROWS + r, is not after `index`."""
    low = 0
    return _request_within(index, cu_q_lens, low, requests, ROWS)


@triton.jit
def _request_within(
    index: tl.tensor, cu_q_lens: tl.tensor, low: tl.tensor, high: tl.tensor, ROWS: tl.constexpr
) -> tl.tensor:
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(cu_q_lens + middle) // ROWS + middle > index
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low
