"""How much Python a step of decodes runs on the host: calls are counted, since times vary."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from weft.engine.base.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.protocol.messages import Inbox
from weft.engine.protocol.submits import Submit
from weft.testing.models.tiny_models import make_tiny

MOST_CALLS = 450
"""Of functions, Python's and C's, in a step of one request without drafts; 379 when it was set.
One more costs about 0.1 microseconds in every step."""
MOST_MORE = 2.0
"""Of each further request; 1.0 when it was set."""
FEW, MANY = 1, 33


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


def least_calls(llm: LLM, num_requests: int) -> int:
    """Least calls of a turn in which all requests run; others also look at deadlines and pages."""
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
