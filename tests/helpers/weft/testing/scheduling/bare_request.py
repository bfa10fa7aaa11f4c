"""A request as the scheduler sees it, of which only some fields matter to a test."""

from __future__ import annotations

import math
from typing import Any

from weft.contract.keys import PageKeys
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.timeline import Timeline
from weft.engine.requests.request import Request, RequestKey


def bare_request(tokens: list[int], page_size: int, namespace: bytes, **fields: Any) -> Request:
    """Creates one sample whose prompt is `tokens`; `fields` override the defaults."""
    defaults: dict[str, Any] = {
        "key": RequestKey(0, "r", 1),
        "sample": 0,
        "num_prompt_tokens": len(tokens),
        "params": SamplingParams(),
        "stop": StopCriteria(),
        "max_tokens": 1,
        "eos_token_ids": frozenset(),
        "seed": 0,
        "top_logprobs": None,
        "keys": PageKeys(namespace, page_size),
        "namespace": namespace,
        "arrival": 0,
        "first_token_deadline": math.inf,
        "deadline": math.inf,
        "timeline": Timeline(submitted_at=0.0),
    }
    return Request(tokens=tokens, **(defaults | fields))
