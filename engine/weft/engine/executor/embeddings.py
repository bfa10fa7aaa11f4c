"""Rows of media on the device, which take the place of tokens' embeddings."""

from __future__ import annotations

import torch
from weft.engine.executor.orders import EncodeMedia
from weft.engine.executor.step_input import InsertedRows
from weft.engine.model.interface import MediaEncoder
from weft.engine.model.step import Inserted


class MediaEmbeddings:
    """Memory for the rows of media: [num_rows, row_width] in the model's dtype."""

    def __init__(
        self,
        encoder: MediaEncoder,
        num_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._encoder = encoder
        self._rows = torch.zeros((num_rows, encoder.row_width), dtype=dtype, device=device)

    def encode(self, order: EncodeMedia) -> None:
        device = self._rows.device
        with torch.inference_mode():
            data = torch.frombuffer(bytearray(order.data), dtype=torch.uint8)
            pixels = data.view(*order.shape).to(device, non_blocking=True)
            made = self._encoder.encode([pixels])
            places = torch.tensor(order.rows, dtype=torch.int64).to(device, non_blocking=True)
            self._rows.index_copy_(0, places, made.to(self._rows.dtype))

    def of(self, inserted: InsertedRows) -> Inserted:
        """What a step's stack puts in place of embeddings."""
        device = self._rows.device
        rows, sources = (
            torch.from_numpy(numbers).to(device, non_blocking=True)
            for numbers in (inserted.rows, inserted.sources)
        )
        return Inserted(rows, self._rows.index_select(0, sources))
