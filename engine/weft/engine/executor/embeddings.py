"""Rows of media on the device, which take the place of tokens' embeddings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from weft.engine.base.device_copies import sent
from weft.engine.executor.encoder_graphs import EncoderGraphs, capture_encoder
from weft.engine.executor.media_inputs import MediaInputs
from weft.engine.executor.orders import EncodeMedia, PackRows, UnpackRows
from weft.engine.executor.page_bytes import read_bytes, write_bytes
from weft.engine.executor.step_input import InsertedRows
from weft.engine.model.interface import MediaEncoder
from weft.engine.model.step import Inserted
from weft.engine.transfer.device_pages import Pages
from weft.kernels.ops.peers.spec import Peers

_NUM_SIDES = 3
"""Numbers of a medium's shape."""


class _Medium(NamedTuple):
    shape: tuple[int, ...]
    data: memoryview
    rows: slice
    """Its rows among those of the order."""


class MediaEmbeddings:
    """Memory for the rows of media: [num_rows, row_width] in the model's dtype.

    Args:
        encoder: None: rows come from other workers, in pages.
        row_width: Elements of a row.
        max_cost: Patches that are encoded together. A single medium may have more.
        peers: Ranks that all have the encoder, and each encode a share of an order's media; None:
            this process encodes all.
    """

    def __init__(
        self,
        encoder: MediaEncoder | None,
        row_width: int,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        max_cost: int,
        peers: Peers | None = None,
    ) -> None:
        self._encoder = encoder
        self.num_rows = num_rows
        self.max_cost = max_cost
        self.num_ranks = 1 if peers is None else peers.size
        self._graphs: EncoderGraphs | None = None
        self._rows = torch.zeros((num_rows, row_width), dtype=dtype, device=device)
        self._peers = peers

    @property
    def encoder(self) -> MediaEncoder:
        assert self._encoder is not None, "the model's encoder is left out"
        return self._encoder

    def inputs(self, max_tokens: int, *, has_axes: bool) -> MediaInputs:
        """What captured steps of at most so many rows read."""
        return MediaInputs(self._rows, max_tokens, has_axes=has_axes)

    @property
    def row_bytes(self) -> int:
        return self._rows.shape[1] * self._rows.element_size()

    @property
    def has_encoder(self) -> bool:
        return self._encoder is not None

    def capture(self, on_capture: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Captures the encoder's passes on a CUDA device, as far as they have fixed sizes. Raises
        ConfigError if there is not enough memory.
        """
        if self._encoder is not None:
            device = self._rows.device
            self._graphs = capture_encoder(self._encoder, self.max_cost, device, on_capture)

    def encode(self, order: EncodeMedia) -> None:
        """With several ranks, all of them must get the order."""
        media, device = list(self._media_of(order)), self._rows.device
        with torch.inference_mode():
            made = torch.zeros(
                (len(order.rows), self._rows.shape[1]), dtype=self._rows.dtype, device=device
            )
            for batch in self._batches(self._own(media)):
                rows, begin = self.encoded([self._pixels(one) for one in batch]), 0
                for one in batch:
                    end = begin + one.rows.stop - one.rows.start
                    made[one.rows], begin = rows[begin:end], end
            self._put(order.rows, made)

    def encoded(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor:
        """`MediaEncoder.encode` by a captured pass where one has room; the result is then valid
        until the next call.
        """
        rows = None if self._graphs is None else self._graphs.encode(pictures)
        return self.encoder.encode(pictures) if rows is None else rows

    def pack(self, order: PackRows, pool: Pages) -> None:
        rows = self._rows.index_select(0, self._index(order.rows))
        write_bytes(rows.view(torch.uint8).view(-1), order.pages, pool)

    def unpack(self, order: UnpackRows, pool: Pages) -> None:
        """With several ranks, all of them must get the order."""
        shape = len(order.rows), self._rows.shape[1]
        with torch.inference_mode():
            if self._peers is not None and self._peers.rank:
                made = self._rows.new_zeros(shape)
            else:
                data = read_bytes(order.pages, pool)
                num_bytes = math.prod(shape) * self._rows.element_size()
                made = data[:num_bytes].view(self._rows.dtype).view(shape)
            self._put(order.rows, made)

    def _put(self, places: Sequence[int], made: torch.Tensor) -> None:
        """Each row of `made` is 0 on all ranks but one."""
        if self._peers is not None:
            parts = made.view(-1, self._peers.width or made.shape[1])
            made = self._peers.add_sum(parts, torch.zeros_like(parts)).view(made.shape)
        self._rows.index_copy_(0, self._index(places), made)

    def _index(self, places: Sequence[int]) -> torch.Tensor:
        return sent(np.array(places, np.int64), self._rows.device)

    def of(self, inserted: InsertedRows) -> Inserted:
        """What a step's stack puts in place of embeddings."""
        sources = sent(inserted.sources, self._rows.device)
        embeddings = self._rows.index_select(0, sources)
        return Inserted(sent(inserted.rows, self._rows.device), embeddings)

    def _media_of(self, order: EncodeMedia) -> Iterator[_Medium]:
        first_row = first_byte = 0
        data = memoryview(order.data)
        for begin in range(0, len(order.shapes), _NUM_SIDES):
            shape = tuple(order.shapes[begin : begin + _NUM_SIDES])
            end_row = first_row + self.encoder.rows_of(shape)
            end_byte = first_byte + math.prod(shape)
            yield _Medium(shape, data[first_byte:end_byte], slice(first_row, end_row))
            first_row, first_byte = end_row, end_byte

    def _own(self, media: Sequence[_Medium]) -> list[_Medium]:
        """The media that this rank encodes. The costliest are dealt first, each to the rank that
        has got least.
        """
        if self._peers is None:
            return list(media)
        costs, own = [0] * self._peers.size, list[_Medium]()
        for one in sorted(media, key=lambda one: self.encoder.cost_of(one.shape), reverse=True):
            rank = costs.index(min(costs))
            costs[rank] += self.encoder.cost_of(one.shape)
            if rank == self._peers.rank:
                own.append(one)
        return own

    def _batches(self, media: Sequence[_Medium]) -> Iterator[Sequence[_Medium]]:
        """Media that are encoded together."""
        batch, cost = list[_Medium](), 0
        for one in media:
            own = self.encoder.cost_of(one.shape)
            if batch and cost + own > self.max_cost:
                yield batch
                batch, cost = [], 0
            batch.append(one)
            cost += own
        if batch:
            yield batch

    def _pixels(self, one: _Medium) -> torch.Tensor:
        device = self._rows.device
        host = torch.empty(one.shape, dtype=torch.uint8, pin_memory=device.type == "cuda")
        host.view(-1).numpy()[:] = np.frombuffer(one.data, np.uint8)
        return host.to(device, non_blocking=True)
