"""Runs an engine of one source tree for `gpu_pairs.py`.

It reads orders from stdin, one JSON object a line, and answers each by a line of JSON on stdout.
The first order names the model's folder, the engine's settings, the folders of adapters that the
requests take in turn, and how many tokens a head drafts in each step. Then `{"answers_to": N}` asks
for the tokens of a batch of N greedy requests, and `{"batch": N}` for the times of such a batch.

It starts with `python -P`, so that `gpu_engine` is that of the tree and not of this folder.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_engine
import numpy as np
from gpu_engine import NEW_TOKENS, PROMPT_TOKENS
from weft.engine.loop.llm import LLM


def orders() -> Iterator[dict[str, Any]]:
    """Orders until stdin ends."""
    for line in sys.stdin:
        yield json.loads(line)


def run_of(llm: LLM, adapters: list[bytes], batch: int, tokens: int) -> Any:
    """A batch of random prompts."""
    if not adapters:
        return gpu_engine.run_batch(llm, batch, PROMPT_TOKENS, tokens)
    prompts = gpu_engine.random_prompts(llm.engine.info.vocab_size, batch, PROMPT_TOKENS)
    names = [adapters[number % len(adapters)] for number in range(batch)]
    greedy, counts = gpu_engine.GREEDY, [tokens] * batch
    return gpu_engine.run_requests(llm, prompts, counts, greedy, adapters=names)


def fix_drafts(llm: LLM, count: int) -> None:
    """Drafts so many tokens for each request in each step."""
    from draft_cost import DraftShape, Watch

    llm.engine.scheduler.running_plans.gate = Watch(None, DraftShape(count, count))


def times_of(llm: LLM, adapters: list[bytes], batch: int) -> dict[str, float]:
    """Times of one batch, milliseconds."""
    run = run_of(llm, adapters, batch, NEW_TOKENS)
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
    settings = first["settings"]
    if head := settings.get("draft_dir"):
        settings["draft_dir"] = Path(head)
    with LLM(first["model"], **settings) as llm:
        adapters = [llm.load_adapter(folder) for folder in first["adapters"]]
        if first["drafts"]:
            fix_drafts(llm, first["drafts"])
        gc.collect()
        gc.freeze()  # As workers do.
        answer: Any = {}
        print(json.dumps(answer), file=answers, flush=True)
        for order in asked:
            if "batch" in order:
                answer = times_of(llm, adapters, order["batch"])
            else:
                answer = run_of(llm, adapters, order["answers_to"], 32).tokens
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
