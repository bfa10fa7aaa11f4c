"""Acceptance lengths that the benchmark of MTP heads on GPUs forces are those that it tells."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.executor.drafts.chains import StaticChains
from weft.engine.loop.llm import LLM
from weft.kernels.shared import cpu
from weft.testing.engine.captured_drafts import capture_chains
from weft.testing.engine.captured_steps import RecordedSteps
from weft.testing.models.tiny_mtp import make_tiny_mtp

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.needs("triton-interpreter"),
]

BENCH = Path(__file__).resolve().parents[3] / "bench"
REQUESTS, ROUNDS = 3, 4


@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_forced_lengths(
    depth: int, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean lengths of 1.5, 2 and 2.5: tokens of each turn are counted."""
    monkeypatch.setattr(cpu, "native_cpu", lambda: None)
    monkeypatch.setattr(cpu, "native_cpu_for", lambda x: None)
    monkeypatch.syspath_prepend(str(BENCH))
    bench: Any = importlib.import_module("gpu_hybrid")
    forced = bench.ForcedChains(depth, "cpu")
    monkeypatch.setattr(StaticChains, "run", lambda chains, shape: forced.run(chains, shape))
    make_tiny_mtp("glm", tmp_path, seed)
    settings = {
        "max_running_requests": 4,
        "max_step_tokens": 40,
        "max_context_tokens": 96,
        "prefill_chunk_tokens": 16,
    }
    with LLM(
        tmp_path,
        dtype="float32",
        page_size=8,
        drafter="mtp",
        draft_gate="fixed",
        max_draft_tokens=depth,
        overlap="on",
        **settings,
    ) as llm:
        RecordedSteps(llm.engine, depth)
        capture_chains(llm.engine, depth)
        llm.engine.scheduler.running_plans.drafts_on_device = True
        llm.engine.parts.local._model._target.lm_head.weight.data.zero_()  # type: ignore[attr-defined]
        period = (depth + 1) * (depth + 2) // 2
        lengths = lengths_of(llm, ROUNDS * period)
        counters = llm.engine.counters()
    for found in lengths.values():
        print(found)
        # The first is the prompt's, the next two may lie before the order; the last have less room.
        behind = found[3 : -depth - 1]
        whole = behind[: len(behind) // (depth + 1) * (depth + 1)]
        assert len(whole) > depth + 1
        assert Counter(whole) == dict.fromkeys(range(1, depth + 2), len(whole) // (depth + 1))
        assert sum(whole) / len(whole) == (depth + 2) / 2
    told = 1 + counters["accepted_tokens"] * depth / counters["drafted_tokens"]
    assert told == pytest.approx((depth + 2) / 2, rel=0.1)


def lengths_of(llm: LLM, num_tokens: int) -> dict[str, list[int]]:
    """Tokens of each turn of each request."""
    sampling = SamplingParams(temperature=0.0)
    stop = StopCriteria(max_tokens=num_tokens, ignore_eos=True)
    submits = [
        Submit(
            gateway=1,
            request_id=str(number),
            attempt=1,
            prompt=[5 + number] * (number + 2),
            sampling=sampling,
            stop=stop,
        )
        for number in range(REQUESTS)
    ]
    inbox: Inbox | None = Inbox(submits=submits)
    found: dict[str, list[int]] = {submit.request_id: [] for submit in submits}
    while inbox is not None or llm.engine.has_work:
        for batch in llm.engine.turn(inbox).gateways:
            assert not batch.failed, batch.failed
            for tokens in batch.all_tokens():
                found[tokens.request_id].append(len(tokens.ids))
        inbox = None
    assert all(sum(lengths) == num_tokens for lengths in found.values())
    return found
