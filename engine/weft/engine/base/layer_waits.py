"""How a step waits for pages that are loaded while it computes, one group of layers at a time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import torch

MAX_GROUPS = 12
"""Most groups of a load. The first is exposed, and each costs a wait of the step and a pass of the
copies over all pages.
"""


class LayerWaits(Protocol):
    """Makes what a model does next wait for layers of the pool."""

    groups: Sequence[range]
    """Layers that come together, in order; they cover all layers of the pool."""

    def wait(self, layer: int) -> None:
        """Waits until the pool has the layer, or the load has failed. On a GPU the work that is
        enqueued next waits.
        """
        ...


def layer_groups(num_layers: int) -> list[range]:
    """Cuts layers into groups of nearly equal size."""
    count = min(MAX_GROUPS, num_layers)
    borders = [num_layers * number // count for number in range(count + 1)]
    return [range(*pair) for pair in pairwise(borders)]


def group_of(groups: Sequence[range], layer: int) -> int:
    return next((at for at, group in enumerate(groups) if layer < group.stop), len(groups) - 1)


class HostWaits:
    """Implements `LayerWaits` on a CPU: the thread that computes sleeps.

    Args:
        timeout_s: Longest time that the next group may take. A load that is slower has failed, and
            the step goes on with what the pages hold; its result must not be used.
    """

    def __init__(self, groups: Sequence[range], timeout_s: float) -> None:
        self.groups = groups
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._num_open = len(groups)
        self.was_left = False
        """Whether a step has gone on without a group of the present load."""

    def close(self) -> None:
        with self._changed:
            self._num_open, self.was_left = 0, False

    def open(self, group: int) -> None:
        with self._changed:
            self._num_open = max(self._num_open, group + 1)
            self._changed.notify_all()

    def wait(self, layer: int) -> None:
        wanted = group_of(self.groups, layer)
        with self._changed:
            while self._num_open <= wanted:
                before = self._num_open
                self._changed.wait(self._timeout_s)
                if self._num_open == before:
                    # Before the last group is opened, so the load knows when it has ended.
                    self._num_open, self.was_left = len(self.groups), True
                    return


class DeviceWaits:
    """Implements `LayerWaits` on a GPU: streams and captured graphs wait for events.

    An event that nobody records again stays passed, so a step that waits for no load costs the
    waits alone.
    """

    def __init__(self, groups: Sequence[range], device: torch.device) -> None:
        self.groups = groups
        self._device = device
        # External events become nodes of a captured graph, which see the latest record at launch.
        self._events = [torch.cuda.Event(external=True) for _ in groups]  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            for event in self._events:
                event.record()  # PyTorch makes an event when it is first recorded.

    def record(self, group: int) -> None:
        """Opens a group once the work of the current stream so far has ended."""
        self._events[group].record(torch.cuda.current_stream(self._device))

    def wait(self, layer: int) -> None:
        event = self._events[group_of(self.groups, layer)]
        event.wait(torch.cuda.current_stream(self._device))
