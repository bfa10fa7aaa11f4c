"""Tiles of rows that belong to one request each; only the device knows how many rows a
request has.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def request_of_tile(
    index: tl.tensor, cu_q_lens: tl.tensor, requests: int, ROWS: tl.constexpr
) -> tl.tensor:
    """The last request whose first tile, cu_q_lens[r] // ROWS + r, is not after `index`."""
    low = 0
    high = requests
    while high - low > 1:
        middle = (low + high) // 2
        is_after = tl.load(cu_q_lens + middle) // ROWS + middle > index
        low = tl.where(is_after, low, middle)
        high = tl.where(is_after, middle, high)
    return low
