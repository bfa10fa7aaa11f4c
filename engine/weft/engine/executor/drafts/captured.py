"""Drafting as CUDA graphs: fixed memory for the requests' columns, and the capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from weft.contract.arrays import Int64Array
from weft.engine.base.device_copies import PinnedBuffers
from weft.engine.executor.device_inputs import DeviceInputs


class StaticColumns:
    """int64 columns with one value per request, in fixed memory.

    Args:
        inputs: Inputs of the steps, on the same device.
        paddings: Values of padding requests in the columns after the first one, which holds slots.
    """

    def __init__(self, inputs: DeviceInputs, paddings: Sequence[int], max_requests: int) -> None:
        self._inputs = inputs
        # A padding request has the dummy slot, which names only the null page.
        self._paddings = (inputs.pages.shape[0] - 1, *paddings)
        device = inputs.pages.device
        self._pinned = PinnedBuffers(device)
        size = len(self._paddings) * max_requests
        self._flat = torch.zeros(size, dtype=torch.int64, device=device)

    def views(self, requests: int) -> list[torch.Tensor]:
        """The columns that were sent last for this number of requests, [requests] each."""
        count = len(self._paddings)
        return list(self._flat[: count * requests].view(count, requests))

    def send(self, columns: Sequence[Int64Array], requests: int) -> None:
        """Sends columns padded to `requests` without waiting. This takes one copy unless there are
        new pages.
        """
        self._inputs.send_pages()
        sent = self._flat[: len(self._paddings) * requests].view(torch.uint8)
        buffer, host_bytes = self._pinned.take(len(sent))
        host = host_bytes[: len(sent)].view(np.int64).reshape(len(self._paddings), requests)
        for column, values, padding in zip(host, columns, self._paddings, strict=True):
            column[: len(values)] = values
            column[len(values) :] = padding
        sent.copy_(buffer[: len(sent)], non_blocking=True)
        self._pinned.sent()


Capture = Callable[[Callable[[], torch.Tensor]], tuple[torch.cuda.CUDAGraph, torch.Tensor]]
"""Captures a function's device work. Returns the graph, and the tensor that holds its result after
each replay.
"""

Bucket = TypeVar("Bucket", bound=tuple[Any, ...])
Captured = dict[Bucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]]
"""By bucket: the graph, and the tensor that holds its result."""


def capture_each(
    buckets: Iterable[Bucket],
    send_nothing: Callable[[Bucket], None],
    run: Callable[[Bucket], torch.Tensor],
    capture: Capture,
) -> Captured[Bucket]:
    """Captures the work of each bucket, largest first.

    The graphs share the memory of the steps' graphs, which are larger. So each adds little more
    than its list of launches, and the memory plan does not count them.

    Args:
        send_nothing: Sends inputs of no request.
    """
    graphs: Captured[Bucket] = {}
    for bucket in sorted(buckets, reverse=True):
        send_nothing(bucket)
        graphs[bucket] = capture(lambda bucket=bucket: run(bucket))  # type: ignore[misc]
    return graphs
