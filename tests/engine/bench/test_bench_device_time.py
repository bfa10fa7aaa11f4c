"""The device time of the engine's benchmark on a GPU: taking it changes nothing in the run."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.engine.loop.llm import LLM
from weft.kernels.shared import cpu
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.models.choices import check_same
from weft.testing.models.every_family import load_reference
from weft.testing.models.tiny_models import make_tiny

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.needs("triton-interpreter"),
]

BENCH = Path(__file__).resolve().parents[3] / "bench"
BATCH = 4


class Event:
    """Of a device that takes no time."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return 0.0


def test_repeated_steps_write_what_they_wrote(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.syspath_prepend(str(BENCH))
    bench = importlib.import_module("gpu_engine")
    monkeypatch.setattr(bench, "PROMPT_TOKENS", 6)
    monkeypatch.setattr(bench, "NEW_TOKENS", 20)
    runs, run_whole = [], bench.run_batch

    def run_batch(*arguments: Any) -> Any:
        runs.append(run_whole(*arguments))
        return runs[-1]

    monkeypatch.setattr(bench, "run_batch", run_batch)
    model_dir = make_tiny("llama", tmp_path, seed, vocab_size=517, num_hidden_layers=4)
    settings = {"dtype": "float32", "page_size": 4, "max_running_requests": BATCH}
    settings |= {"max_step_tokens": 40, "prefill_chunk_tokens": 16, "max_context_tokens": 64}
    with LLM(model_dir, **settings) as plain:
        bench.run_batch(plain, BATCH, 6, 20)
    with LLM(model_dir, overlap="on", **settings) as captured:
        RecordedSteps(captured.engine, 0)
        bench.device_ms(captured, BATCH)
    expected, repeated = runs
    for prompt, one, other in zip(expected.prompts, repeated.tokens, expected.tokens, strict=True):
        check_same(partial(load_reference, model_dir), prompt, one, other)
