"""`weft.kernels.ops.routes` on a GPU: one launch for each layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from weft.kernels.shared.launch_sizes import next_power_of_2


def record(routes: torch.Tensor, places: torch.Tensor, layer: int, ids: torch.Tensor) -> None:
    rows, top_k = ids.shape
    if not rows:
        return
    _record_kernel[(rows,)](
        routes,
        places,
        ids,
        layer,
        routes.stride(0),
        *routes.shape[1:3],
        TOP_K=top_k,
        BLOCK=next_power_of_2(top_k),
        num_warps=1,
    )


@triton.jit(do_not_specialize=["layer", "page_stride", "page_size", "layers"])
def _record_kernel(
    routes: tl.tensor,
    places: tl.tensor,
    ids: tl.tensor,
    layer: int,
    page_stride: int,
    page_size: int,
    layers: int,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    page = place // page_size
    number = tl.arange(0, BLOCK)
    exists = number < TOP_K
    chosen = tl.load(ids + row * TOP_K + number, mask=exists, other=0)
    at = page * page_stride + ((place - page * page_size) * layers + layer) * TOP_K + number
    tl.store(routes + at, chosen.to(routes.dtype.element_ty), mask=exists)
