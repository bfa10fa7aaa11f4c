"""Sampling that a model recommends in generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty
from weft.contract.request import SAMPLING_DEFAULTS
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2

OWN = {"temperature": 0.5, "top_p": 0.75, "top_k": 20, "repetition_penalty": 1.25}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


def answer(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
    return Script(tokens=[[5]])


async def drawn(mesh: Harness, **fields: Any) -> dict[str, float]:
    """What the worker was told of a chat's sampling."""
    await mesh.json("ChatCompletions", CHAT | fields)
    sampling = mesh.workers[0].submits[-1].sampling
    return {name: getattr(sampling, name) for name in SAMPLING_DEFAULTS}


@pytest.mark.parametrize("chosen", ["auto", "none"])
async def test_requests_that_say_nothing_are_drawn_as_the_model_recommends(
    tmp_path: Path, chosen: str
) -> None:
    defaults = dict(SAMPLING_DEFAULTS) | (OWN if chosen == "auto" else {})
    async with gateway(tmp_path, answer, generation=OWN, generation_config=chosen) as mesh:
        assert await drawn(mesh) == defaults
        assert await drawn(mesh, temperature=0, top_k=-1) == defaults | {
            "temperature": 0,
            "top_k": 0,
        }
        (listed,) = json.loads((await mesh.openai.Models(Empty())).data)["data"]
        assert listed["default_sampling_params"] == defaults
