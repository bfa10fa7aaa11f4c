"""How much Python a step runs on the host: calls are counted, since times vary."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.submits import Submit
from weft.engine.loop.llm import LLM
from weft.testing.models.lora_reference import BASE
from weft.testing.models.tiny_adapters import make_adapter
from weft.testing.models.tiny_drafts import make_tiny_draft
from weft.testing.models.tiny_models import make_tiny

MOST_CALLS = 450
"""Of functions, Python's and C's, in a step of one request without drafts; 379 when it was set.
One more costs about 0.1 microseconds in every step."""
MOST_MORE = 2.0
"""Of each further request; 1.0 when it was set."""
FEW, MANY = 1, 33
MOST_WITH_DRAFTS = 860
"""Calls of a step of one request whose drafts a head makes; 798 when it was set."""
MOST_WITH_ADAPTERS = 670
"""Calls of a step of four requests, two with an adapter each; 618 when it was set."""


@pytest.mark.needs("cc")
def test_a_step_of_decodes_calls_few_functions(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path, 1)
    with LLM(
        model_dir, dtype="float32", num_pages=200, num_threads=1, max_running_requests=MANY
    ) as llm:
        few, many = (least_calls(llm, count) for count in (FEW, MANY))
    print("calls of a step:", {FEW: few, MANY: many})
    assert few <= MOST_CALLS
    assert (many - few) / (MANY - FEW) <= MOST_MORE


@pytest.mark.needs("cc")
def test_a_step_of_drafts_calls_few_functions(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "model", 1)
    head = make_tiny_draft(tmp_path / "head", model_dir, 2)
    drafts = {"draft_dir": head, "drafter": "eagle3", "draft_gate": "fixed", "draft_width": 1}
    with LLM(model_dir, dtype="float32", num_pages=50, num_threads=1, **drafts) as llm:
        calls = least_calls(llm, 1)
        assert llm.engine.counters()["drafted_tokens"] > 0
    print("calls of a step:", calls)
    assert calls <= MOST_WITH_DRAFTS


@pytest.mark.needs("cc")
def test_a_step_of_adapters_calls_few_functions(tmp_path: Path) -> None:
    model_dir = make_tiny("llama", tmp_path / "model", 1)
    config = json.loads((model_dir / "config.json").read_text())
    paths = [make_adapter(tmp_path / str(seed), config, seed) for seed in (2, 3)]
    with LLM(model_dir, dtype="float32", num_pages=50, num_threads=1, enable_lora=True) as llm:
        adapters = [BASE, *map(llm.load_adapter, paths), BASE]
        llm.generate([[5]] * len(adapters), adapters=adapters)  # They come to the device.
        calls = least_calls(llm, len(adapters), adapters)
    print("calls of a step:", calls)
    assert calls <= MOST_WITH_ADAPTERS


def least_calls(llm: LLM, num_requests: int, adapters: Sequence[bytes] = ()) -> int:
    """Least calls of a turn in which all requests run; others also look at deadlines and pages.

    Args:
        llm: The engine.
        num_requests: Requests that run at once.
        adapters: Of each of them; none: no request has one.
    """
    sampling, stop = SamplingParams(temperature=0.0), StopCriteria(max_tokens=24, ignore_eos=True)
    inbox: Inbox | None = Inbox(
        submits=[
            Submit(
                gateway=1,
                request_id=str(number),
                attempt=1,
                prompt=[5 + number, 6, 7],
                sampling=sampling,
                stop=stop,
                adapter=adapters[number] if adapters else BASE,
            )
            for number in range(num_requests)
        ]
    )
    engine, found, calls = llm.engine, list[int](), 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    while inbox is not None or engine.has_work:
        is_full = len(engine.scheduler.running) == num_requests
        calls = 0
        sys.setprofile(count)
        try:
            outbox = engine.turn(inbox)
        finally:
            sys.setprofile(None)
        inbox = None
        if is_full and not any(batch.finished for batch in outbox.gateways):
            found.append(calls)
    return min(found)
