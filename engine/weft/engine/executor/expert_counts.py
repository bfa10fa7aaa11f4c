"""Counts the rows of each expert.

While counts are wanted, each layer's router writes the experts of its rows into a buffer, and at
the step's end one pass counts all layers. On a GPU captured steps write the buffer always, if the
worker was started so that they do, and the pass is launched only while counts are wanted.
"""

from __future__ import annotations

import torch
from weft.checkpoint.config import ModelConfig
from weft.contract.arrays import Int64Array
from weft.engine.model.step import ChosenMemory

_NOBODY = -1


class ExpertCounts:
    """Belongs to the thread that runs the steps.

    Args:
        config: Of a model with experts.
        max_rows: Most rows of a step whose memory does not move, on a GPU.
    """

    def __init__(self, config: ModelConfig, max_rows: int, device: torch.device) -> None:
        moe = config.moe
        assert moe is not None, "the model has experts"
        self.layers = tuple(filter(moe.is_sparse, range(config.num_layers)))
        self.num_experts, self._top_k = moe.num_experts, moe.num_experts_per_tok
        self._device = device
        self._by_layer = {layer: index for index, layer in enumerate(self.layers)}
        self._memory = self._room_for(max_rows if device.type == "cuda" else 0)
        shape = len(self.layers), self.num_experts + 1
        self._rows = torch.zeros(shape, dtype=torch.int64, device=device)
        self._steps = torch.zeros_like(self._rows)
        self._first = torch.arange(shape[0], device=device).mul_(shape[1])[:, None]
        self.num_steps = 0
        self.every = 0
        """Steps of which one is counted; 0: none is."""
        self._passed = 0
        self._is_counting = False

    def _room_for(self, rows: int) -> ChosenMemory:
        shape = len(self.layers), rows, self._top_k
        chosen = torch.full(shape, _NOBODY, dtype=torch.int32, device=self._device)
        return ChosenMemory(chosen, self._by_layer)

    @property
    def memory(self) -> ChosenMemory:
        """What captured steps write."""
        return self._memory

    def begin(self, num_rows: int) -> None:
        """Called before each step."""
        self._is_counting = False
        if not self.every:
            return
        self._passed += 1
        if self._passed < self.every:
            return
        self._passed = 0
        if num_rows > self._memory.chosen.shape[1]:
            if self._device.type == "cuda":
                return
            self._memory = self._room_for(num_rows)
        self._is_counting = True
        # The last layer may compute fewer rows than the others.
        self._memory.chosen[:, :num_rows].fill_(_NOBODY)

    @property
    def of_step(self) -> ChosenMemory | None:
        """What the present step writes unless it is captured; None: nothing."""
        return self._memory if self._is_counting else None

    def end(self, num_rows: int) -> None:
        """Called once the step has been launched."""
        if not self._is_counting:
            return
        chosen = self._memory.chosen[:, :num_rows].flatten(1).long()
        # Rows that a layer did not compute count for the entry before the layer's first expert.
        places = (chosen + (1 + self._first)).flatten()
        found = torch.zeros_like(self._rows)
        # `torch.bincount` would wait for the device, which decides how many entries it has.
        found.view(-1).index_add_(0, places, torch.ones_like(places))
        self._rows += found
        self._steps += found > 0
        self.num_steps += 1

    def reset(self) -> None:
        self._rows.zero_()
        self._steps.zero_()
        self.num_steps = 0

    def read(self) -> tuple[Int64Array, Int64Array]:
        """[layers, E]: rows that chose each expert, and steps in which some row did."""
        rows, steps = (each[:, 1:].cpu().numpy().copy() for each in (self._rows, self._steps))
        return rows, steps
