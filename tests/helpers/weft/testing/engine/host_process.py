"""One host of an engine that has several, in a process of its own.

    python -m weft.testing.engine.host_process MODEL_DIR SETTINGS PROMPTS

Settings and prompts are JSON. Host 0 prints the greedy texts of the prompts as JSON, each asked
twice, and its notices; with an empty list of prompts it generates until a host is lost, and prints
the error and the seconds since the last step had ended. The other hosts follow.
"""

from __future__ import annotations

import json
import logging
import random
import sys
import time
from pathlib import Path
from typing import Any

from weft.contract.errors import RanksLost, WeftError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.base.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.executor.ranks.follow import follow_host
from weft.engine.loop.llm import LLM

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 8,
    "prefill_chunk_tokens": 24,
    "max_step_tokens": 48,
    "max_running_requests": 8,
    "num_pages": 96,
    "num_threads": 1,
    "poison_free_pages": True,
    "drafter": "ngram",
    "draft_gate": "fixed",
    "max_draft_tokens": 3,
    "transport": "data",
    "local_prefill_max_tokens": NEVER_SHIP_TOKENS,
}
GREEDY = SamplingParams(temperature=0.0)


def texts_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    stop = StopCriteria(max_tokens=16, ignore_eos=True)
    found = [*llm.generate(prompts, GREEDY, stop), *llm.generate(prompts, GREEDY, stop)]
    return [sample.token_ids for sample in found]


def until_lost(llm: LLM) -> dict[str, Any]:
    ended_at = time.monotonic()
    try:
        while True:
            print("a text", file=sys.stderr, flush=True)
            prompt = [random.randrange(3, 250) for _ in range(20)]
            llm.generate([prompt], GREEDY, StopCriteria(max_tokens=8))
            ended_at = time.monotonic()
    except RanksLost as lost:
        return {"error": str(lost), "seconds": time.monotonic() - ended_at}


def main(argv: list[str]) -> int:
    """Runs the host; returns the exit status."""
    logging.basicConfig(level="INFO")
    folder, settings, prompts = Path(argv[0]), json.loads(argv[1]), json.loads(argv[2])
    for name in ("tls_cert", "tls_key", "tls_ca"):
        if name in settings:
            settings[name] = Path(settings[name])
    if settings.get("host_rank"):
        return follow_host(EngineConfig(model_dir=folder, **SIZES | settings))
    try:
        with LLM(folder, **SIZES | settings) as llm:
            found: dict[str, Any] = {"notices": llm.engine.info.notices}
            found |= {"texts": texts_of(llm, prompts)} if prompts else until_lost(llm)
    except WeftError as error:
        found = {"error": error.message}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
