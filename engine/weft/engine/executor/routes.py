"""The routes of experts in pages of the first group, and how they are read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from weft.checkpoint.config import ModelConfig
from weft.contract.layout import RoutePlane
from weft.engine.base.device_copies import on_host
from weft.engine.model.step import RouteMemory
from weft.kernels.ops.pages import page_index

_DTYPES = {1: torch.uint8, 2: torch.int16}


def route_plane(config: ModelConfig) -> RoutePlane:
    """Of a model that has experts (`check_combination`)."""
    moe = config.moe
    assert moe is not None, "models without experts are refused"
    layers = tuple(filter(moe.is_sparse, range(config.num_layers)))
    number_bytes = 1 if moe.num_experts <= 1 << 8 else 2
    return RoutePlane(layers, config.num_layers, moe.num_experts_per_tok, number_bytes)


def by_page(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A view of [num_pages, elements] as [num_pages, *shape]."""
    begin = rows.storage_offset()
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return rows.as_strided((rows.shape[0], *shape), (rows.stride(0), *strides), begin)


class PageRoutes:
    """The routes in a pool.

    Args:
        pages: [num_pages, bytes of a page with its routes] uint8, contiguous.
        begin: First byte of the routes in a page.
    """

    def __init__(self, plane: RoutePlane, pages: torch.Tensor, begin: int, page_size: int) -> None:
        self.plane = plane
        used = page_size * plane.width * plane.number_bytes
        numbers = pages[:, begin : begin + used].view(_DTYPES[plane.number_bytes])
        routes = by_page(numbers, (page_size, len(plane.layers), plane.top_k))
        self.memory = RouteMemory(routes, {of: at for at, of in enumerate(plane.layers)})
        self._stream: torch.cuda.Stream | None = None
        if pages.is_cuda:
            self._stream = torch.cuda.Stream(pages.device)  # type: ignore[no-untyped-call]

    def read(self, pages: Sequence[int], begin: int, end: int) -> NDArray[np.generic]:
        """Routes of the positions from `begin` to `end`: [positions, all layers, k] uint8 or
        uint16; layers without experts have zeros.

        Args:
            pages: Pages of the positions from 0 on, which no step writes meanwhile.
        """
        plane, size = self.plane, self.memory.routes.shape[1]
        first = begin // size
        wanted = pages[first : -(-end // size)]
        if self._stream is None:
            found = self._taken(wanted)
        else:
            with torch.cuda.stream(self._stream):
                found = on_host(self._taken(wanted))
        numbers = found.flatten(0, 1).numpy().view(f"<u{plane.number_bytes}")
        numbers = numbers[begin - first * size : end - first * size]
        out = np.zeros((len(numbers), plane.all_layers, plane.top_k), numbers.dtype)
        out[:, list(plane.layers)] = numbers
        return out

    def _taken(self, pages: Sequence[int]) -> torch.Tensor:
        routes = self.memory.routes
        return routes.index_select(0, page_index(pages, routes.device))
