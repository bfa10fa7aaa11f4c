"""Fills that a prefill worker declines because too much waits there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from weft.engine.base.config import EngineConfig
from weft.engine.loop.fill_jobs import ComputeJobs
from weft.testing.services.fill_commands import fill_handle


@pytest.mark.parametrize(
    ("num_waiting", "num_tokens", "reason"),
    [(0, 0, ""), (2, 100, ""), (3, 0, "busy"), (0, 101, "busy")],
)
def test_a_worker_with_a_long_queue_is_busy(
    num_waiting: int, num_tokens: int, reason: str, tmp_path: Path
) -> None:
    config = EngineConfig(model_dir=tmp_path)
    config = replace(config, max_waiting_requests=3, max_queued_fill_tokens=100)
    handle = fill_handle(bytes(16))
    scheduler: Any = SimpleNamespace(
        num_waiting=num_waiting, num_tokens_before=lambda adapter: num_tokens
    )
    intake: Any = SimpleNamespace(namespace=lambda *_: handle.namespace, vocab_size=10)
    sizes, look_up = (1000, 1000), lambda request: None
    jobs = ComputeJobs(config, intake, scheduler, *sizes, look_up, lambda digest: True, lambda: 0.0)
    assert jobs.why_not(handle)[0] == reason
