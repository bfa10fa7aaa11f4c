"""What the rule for bursts does to a burst on a GPU, by the simulation of `bench/burst.py`."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
MODEL = "llama-3.1-8b"
REQUESTS, PROMPT, TOKENS = 128, 512, 64


@pytest.fixture
def burst(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.delitem(sys.modules, "burst", raising=False)
    return importlib.import_module("burst")


def test_a_burst_is_worked_off_almost_as_fast_as_its_prompts_can_be(burst: ModuleType) -> None:
    options = argparse.Namespace(
        requests=REQUESTS,
        rate=0.0,
        prompt=[PROMPT],
        tokens=TOKENS,
        max_running=256,
        shared_step_tokens=None,
    )
    device = burst.DEVICES[MODEL]
    bound_ms = 1e3 * REQUESTS * PROMPT / device.tokens_per_s
    target, default, most = (
        burst.measure(MODEL, "fcfs", weight, options) for weight in (0.0, 1.0, 1e6)
    )
    assert bound_ms < most.ttft_p99_ms <= default.ttft_p99_ms <= 1.06 * bound_ms
    assert default.ttft_p99_ms <= target.ttft_p99_ms
    # First tokens cost no throughput, and by default hardly longer gaps than the target's.
    assert min(default.tokens_per_s, most.tokens_per_s) >= 0.99 * target.tokens_per_s
    assert default.gap_p99_ms <= 1.1 * target.gap_p99_ms < most.gap_p99_ms
