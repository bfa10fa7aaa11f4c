"""Runs an engine of one source tree for `gpu_pairs.py`.

It reads orders from stdin, one JSON object a line, and answers each by a line of JSON on stdout.
The first order names the model's folder and the engine's settings. Then `{"answers_to": N}` asks
for the tokens of a batch of N greedy requests, and `{"batch": N}` for the times of such a batch.

It starts with `python -P`, so that `gpu_engine` is that of the tree and not of this folder.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from typing import Any

import gpu_engine
import numpy as np
from gpu_engine import NEW_TOKENS, PROMPT_TOKENS
from weft.engine.loop.llm import LLM


def orders() -> Iterator[dict[str, Any]]:
    """Orders until stdin ends."""
    for line in sys.stdin:
        yield json.loads(line)


def times_of(llm: LLM, batch: int) -> dict[str, float]:
    """Times of one batch, milliseconds."""
    run = gpu_engine.run_batch(llm, batch, PROMPT_TOKENS, NEW_TOKENS)
    host_ms = 1e3 * np.array(run.host_s)
    return {
        "step, ms": 1e3 * run.seconds / run.num_steps,
        "host of a step p10, ms": float(np.quantile(host_ms, 0.1)),
        "host of a step p50, ms": float(np.quantile(host_ms, 0.5)),
        "last first token, ms": 1e3 * run.first_token_s,
    }


def main() -> int:
    """Entry point."""
    answers, sys.stdout = sys.stdout, sys.stderr
    asked = orders()
    first = next(asked)
    with LLM(first["model"], **first["settings"]) as llm:
        gc.collect()
        gc.freeze()  # As workers do.
        answer: Any = {}
        print(json.dumps(answer), file=answers, flush=True)
        for order in asked:
            if "batch" in order:
                answer = times_of(llm, order["batch"])
            else:
                answer = gpu_engine.run_batch(llm, order["answers_to"], PROMPT_TOKENS, 32).tokens
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
