"""Loads by layer beside which a step runs, however slow the machine is."""

from __future__ import annotations

import threading

import pytest
from weft.engine.executor import layer_pools
from weft.engine.executor.port import Launched
from weft.engine.executor.step_input import StepInput
from weft.engine.loop import pipeline
from weft.engine.loop.engine import Engine


class WaitingSteps:
    """Counts an engine's steps that wait for layers. A load on a CPU copies its second group only
    once such a step has begun, and fails if none does.
    """

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        local, has_begun = engine.parts.local, threading.Event()
        layers, launch = local.layer_pool, local.launch
        assert isinstance(layers, layer_pools.HostLayers)
        begin, open_group = layers.begin, layers.open

        def counted(step: StepInput) -> Launched:
            if step.waits_for_layers:
                self.count += 1
                has_begun.set()
            return launch(step)

        def begin_anew() -> None:
            has_begun.clear()
            begin()

        def open_and_wait(group: int) -> None:
            open_group(group)
            if group == 0:
                assert has_begun.wait(30.0), "no step waits for the layers of this load"

        local.launch = counted  # type: ignore[method-assign]
        layers.begin = begin_anew  # type: ignore[method-assign]
        layers.open = open_and_wait  # type: ignore[method-assign]


def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on do not give loads by layer up because they are slow."""
    monkeypatch.setattr(layer_pools, "HOST_TIMEOUT_S", 60.0)
    monkeypatch.setattr(pipeline, "INCOMING_TIMEOUT_S", 60.0)
