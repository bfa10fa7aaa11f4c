"""Passes of an encoder of media, captured as CUDA graphs: one launch instead of several hundred."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from weft.engine.executor.graphs import capture_graph, capturing
from weft.engine.model.interface import EncoderBudgets, HasBudgets, MediaEncoder

logger = logging.getLogger(__name__)

Pass = Callable[[], torch.Tensor]
Capture = Callable[[Pass], Pass]
"""Makes a pass that does the same again, into the same memory."""


class EncoderGraphs:
    """Encodes media by passes of fixed sizes.

    Args:
        budgets: The passes.
        capture: Called with each of them, the largest first.
        on_capture: Called after each with (captured, total).
    """

    def __init__(
        self,
        budgets: EncoderBudgets,
        capture: Capture,
        on_capture: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._budgets = budgets
        self._passes = dict[int, Pass]()
        for size in reversed(budgets.sizes):
            self._passes[size] = capture(partial(budgets.run, size))
            on_capture(len(self._passes), len(budgets.sizes))

    def encode(self, pictures: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """`MediaEncoder.encode`, whose result is valid until the next call. None: no pass has room
        for the media.
        """
        placed = self._budgets.put(pictures)
        if placed is None:
            return None
        rows = self._passes[placed.size]()
        if placed.order is None:
            return rows[: placed.num_rows]
        return rows.index_select(0, placed.order)


def capture_encoder(
    encoder: MediaEncoder,
    max_cost: int,
    device: torch.device,
    on_capture: Callable[[int, int], None] = lambda done, total: None,
) -> EncoderGraphs | None:
    """Captures the passes of an encoder on a CUDA device, for media of up to `max_cost` patches
    together. None, and a word in the log: its passes have no fixed sizes. Raises ConfigError if
    there is not enough memory.
    """
    if not isinstance(encoder, HasBudgets):
        logger.info("no CUDA graphs of the encoder: each clip's length decides what it computes")
        return None
    memory = torch.cuda.graph_pool_handle()

    def capture(run: Pass) -> Pass:
        graph, rows = capture_graph(run, device, memory)

        def replay() -> torch.Tensor:
            graph.replay()
            return rows

        return replay

    with capturing("the encoder"), torch.inference_mode():
        return EncoderGraphs(encoder.budgets(max_cost), capture, on_capture)


def measure_encoder_graphs(encoder: MediaEncoder, max_cost: int, device: torch.device) -> int:
    """Bytes of device memory that `capture_encoder` takes. It captures all passes and discards
    them.
    """
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info(device)[0]
    graphs = capture_encoder(encoder, max_cost, device)
    taken = before - torch.cuda.mem_get_info(device)[0]
    del graphs
    torch.cuda.empty_cache()
    return max(0, taken)
