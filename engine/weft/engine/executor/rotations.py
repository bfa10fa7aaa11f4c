"""Rotations of requests with images, whose positions along several axes are not their tokens'."""

from __future__ import annotations

import torch
from weft.checkpoint.vision_config import NUM_AXES
from weft.engine.base.device_copies import sent
from weft.engine.executor.step_input import TurnedRows
from weft.engine.model.step import Step


class SlotRotations:
    """What is added to the positions of each slot's rows for their rotations, on the device."""

    def __init__(self, max_requests: int, device: torch.device) -> None:
        # The slot after the last one is that of padding.
        self._shifts = torch.zeros(max_requests + 1, dtype=torch.int64, device=device)
        self._shifted = set[int]()

    def shift(self, slot: int, shift: int) -> None:
        """Sets a slot's shift for the steps that are launched after this."""
        with torch.inference_mode():
            self._shifts[slot].fill_(shift)
        if shift:
            self._shifted.add(slot)
        else:
            self._shifted.discard(slot)

    def turn(self, step: Step, turned: TurnedRows | None) -> None:
        """Sets a step's rotations, unless they are by its positions. `turned` has the rows whose
        axes differ.
        """
        if self._shifted or turned is not None:
            self.turn_captured(step)
        if turned is None:
            return
        rows, own = (sent(part, self._shifts.device) for part in turned)
        axes = step.turn_rows[:, None].repeat(1, NUM_AXES)
        step.axes = axes.index_copy_(0, rows, own)

    def of_chains(self, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """[D, R]: what rotates rows at these positions, of requests in these slots, [R]. Waits
        for nothing.
        """
        return positions + self._shifts.index_select(0, slots)

    def turn_captured(self, step: Step) -> None:
        """Sets the rotations of rows by their slots. Waits for nothing, so it can be captured."""
        assert step.slots is not None, "steps name their slots"
        shifts, group = self._shifts.index_select(0, step.slots), step.groups[0]
        if group.max_q_len > 1:
            rows = torch.arange(len(step.positions), dtype=torch.int32, device=shifts.device)
            requests = torch.searchsorted(group.cu_q_lens[1:], rows, right=True)
            # Rows of padding come after those of the last request.
            shifts = shifts.index_select(0, requests.clamp_(max=len(shifts) - 1))
        step.turned_by = step.positions + shifts
