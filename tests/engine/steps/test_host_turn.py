"""Reading adapters gives way to an engine that computes on the host, not to one that waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from weft.checkpoint.adapters.plan import DENSE
from weft.checkpoint.adapters.projections import projections_of
from weft.checkpoint.config import ModelConfig
from weft.contract import give_way as host_turn
from weft.contract.give_way import HostPriority
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.port import ExecutorFacts
from weft.engine.executor.step_input import StepInput
from weft.engine.loop.llm import LLM
from weft.engine.model.adapters.formats import read_adapter
from weft.engine.model.adapters.weights import host_weights
from weft.engine.sampling.pending import PendingTokens, SampledRows
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_models import make_tiny, tiny_config


@pytest.mark.parametrize("is_asynchronous", [True, False])
def test_the_host_rests_while_it_waits_for_the_device(
    is_asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device is the engine's own thread, nobody waits for it."""
    model_dir = make_tiny("llama", tmp_path, 1)
    wait, launch = PendingTokens.wait, LocalExecutor.launch
    waited, computed = list[bool](), list[bool]()

    def facts(page_size: int, sizes: Sequence[int], **_: bool) -> ExecutorFacts:
        return ExecutorFacts(page_size, sizes, is_asynchronous=is_asynchronous)

    monkeypatch.setattr("weft.engine.executor.local.ExecutorFacts", facts)
    with LLM(model_dir, dtype="float32", num_pages=64, num_threads=1, overlap="on") as llm:
        host = llm.engine.parts.host

        def noted_wait(tokens: PendingTokens) -> SampledRows:
            waited.append(host._rests.is_set())
            return wait(tokens)

        def noted_launch(executor: LocalExecutor, step: StepInput) -> object:
            computed.append(host._rests.is_set())
            return launch(executor, step)

        monkeypatch.setattr(PendingTokens, "wait", noted_wait)
        monkeypatch.setattr(LocalExecutor, "launch", noted_launch)
        llm.generate([[5, 6, 7]], SamplingParams(temperature=0.0), StopCriteria(max_tokens=4))
        assert host._rests.is_set()
    assert waited
    assert all(waited)
    assert computed
    assert not is_asynchronous or not any(computed)
    assert is_asynchronous or all(computed)


def test_every_part_of_reading_gives_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each tensor of the header, its name, its module, its numbers and its rows."""
    config = tiny_config("llama")
    model, path = ModelConfig.from_dict(config), make_adapter(tmp_path / "adapter", config, 1)
    num_waits = 0

    def counted(host: HostPriority, most_s: float) -> None:
        nonlocal num_waits
        num_waits += 1

    monkeypatch.setattr(host_turn, "SLICE_S", 0.0)
    monkeypatch.setattr(HostPriority, "wait", counted)
    token = host_turn._guest.set(None)
    try:
        HostPriority().enter_thread()
        adapter = read_adapter(path, model, max_rank=64, dtype=torch.float32, parts={DENSE})
        num_modules = len(adapter.modules)
        assert num_modules >= 2 * model.num_layers
        # A and B of each: header, name and numbers.
        assert num_waits >= 7 * num_modules
        before = num_waits
        kinds = sorted({kind for _, kind in adapter.modules})
        parts = projections_of(model, kinds)
        host_weights(
            adapter, parts, 64, lambda name: None, vocab_size=model.vocab_size, for_gpu=False
        )
        assert num_waits >= before + 2 * num_modules
    finally:
        host_turn._guest.reset(token)
