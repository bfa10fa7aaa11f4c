"""Records the experts that a router has chosen for each row, in the pages of the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from weft.kernels.shared.deferred import deferred

if TYPE_CHECKING:
    from weft.kernels.ops.routes import triton_record as _triton_record
else:
    _triton_record = deferred(__name__, "weft.kernels.ops.routes.triton_record")


class RouteRecord(NamedTuple):
    """Where the routes of one layer go."""

    routes: torch.Tensor
    """[num_pages, page_size, layers, k] uint8 or int16 (unsigned numbers of 16 bits), contiguous
    within a page; written.
    """
    places: torch.Tensor
    """[T] int64: each row's page times page_size plus its position in the page."""
    layer: int
    """Index of the layer in `routes`."""


def record_routes(record: RouteRecord, ids: torch.Tensor) -> None:
    """Writes the experts of each row.

    Args:
        ids: [T, k] int32: numbers of experts, each below 2**8 or 2**16.

    Raises:
        ValueError: Shapes or dtypes do not fit.
    """
    routes, places, layer = record
    if ids.dtype != torch.int32 or ids.shape != (places.shape[0], routes.shape[3]):
        raise ValueError(f"experts {tuple(ids.shape)} {ids.dtype} of {len(places)} rows")
    if routes.dtype not in (torch.uint8, torch.int16) or not routes[:1].is_contiguous():
        raise ValueError(f"routes are {routes.dtype} {tuple(routes.shape)} {routes.stride()}")
    if routes.is_cuda:
        _triton_record.record(routes, places, layer, ids)
    else:
        record_reference(record, ids)


def record_reference(record: RouteRecord, ids: torch.Tensor) -> None:
    """`record_routes` in eager torch, any device; a CPU uses it too."""
    routes, places, layer = record
    page_size = routes.shape[1]
    pages = places.div(page_size, rounding_mode="floor")
    routes[pages, places - pages * page_size, layer] = ids.to(routes.dtype)
