"""What a decode worker keeps of open requests for a crash dump."""

from __future__ import annotations

import pytest
from weft.common.telemetry.request_log import to_line
from weft.decode.ledger import Ledger
from weft.v1 import common_pb2, decode_pb2


@pytest.mark.parametrize("has_tokens", [False, True])
def test_what_a_client_wrote_is_kept_only_with_tokens(has_tokens: bool) -> None:
    ledger = Ledger(has_tokens)
    sampling = common_pb2.SamplingParams(temperature=0.5, seed=7)
    sampling.constraint.choice.choices.append("a secret choice")
    submit = decode_pb2.Submit(
        request_id="r",
        attempt=1,
        sampling=sampling,
        stop=common_pb2.StopCriteria(max_tokens=9, stop=["a secret end"]),
    )
    ledger.on_submit(submit, 1, [5, 6, 7])
    (line,) = ledger.prompts()
    assert (line.num_prompt_tokens, line.stop["max_tokens"]) == (3, 9)
    assert line.sampling["temperature"] == 0.5
    assert line.prompt_ids == ([5, 6, 7] if has_tokens else None)
    assert ("secret" in to_line(line)) == has_tokens
    assert (line.stop.get("stop") == ["a secret end"]) == has_tokens
