"""An engine with ranks in a process of its own, since a process can have one on GPUs.

    python -m weft.testing.engine.ranked_texts \
        texts|greedy|moved|company|adapted|drafted|drafted-texts|killed|stopped \
        MODEL_DIR SETTINGS PROMPTS ADAPTERS

Settings, prompts and folders of adapters are JSON, as are the results on standard output.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from weft.contract.errors import RanksLost
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.engine.drafters import RandomGate
from weft.testing.engine.eagle3_cases import NotedChains
from weft.testing.engine.moved_experts import Shuffler
from weft.testing.models.tiny_models import make_tiny

VOCAB = 517
GREEDY = SamplingParams(temperature=0.0)


def make_llm(folder: Path, **settings: Any) -> LLM:
    """An engine with drafts and small steps."""
    sizes = {"page_size": 16, "prefill_chunk_tokens": 64, "max_step_tokens": 96, "num_pages": 60}
    sizes |= {"max_running_requests": 6, "poison_free_pages": True}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, **{"device": "cuda", "dtype": "float32"} | sizes | drafts | settings)


def make_model(kind: str, folder: Path, **settings: Any) -> Path:
    """A tiny model whose heads four ranks can divide."""
    sizes = {"num_attention_heads": 8, "moe_intermediate_size": 64, "head_dim": 64}
    sizes |= {"num_experts": 8} if kind == "qwen3_moe" else {}
    seed = random.randrange(1 << 30)
    return make_tiny(kind, folder, seed, tokenizer=True, vocab_size=VOCAB, **sizes, **settings)


def random_prompts(lengths: Sequence[int], beginning: int = 40) -> list[list[int]]:
    """Prompts that share their beginning if they are longer than it."""
    shared = [random.randrange(3, VOCAB) for _ in range(beginning)]
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


def check_texts(found: list[dict[str, Any]], alone: list[dict[str, Any]]) -> None:
    """Texts of ranks are those of one GPU."""
    for one, other in zip(alone, found, strict=True):
        assert other["tokens"] == one["tokens"]
        assert other["reason"] == one["reason"]
        assert other["logprobs"] == pytest.approx(one["logprobs"], abs=1e-3)


def sampled(rows: int) -> list[SamplingParams]:
    """Greedy, drawn, penalised and constrained ones, and ones that repeat themselves."""
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, seed=11),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, constraint=Constraint(kind="regex", text="[ab]{3,9}c")),
        replace(GREEDY, logit_bias=dict.fromkeys((7, 8, 9), 50.0)),
    )
    return [kinds[row % len(kinds)] for row in range(rows)]


def texts_of(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Texts of all kinds of requests, and prefix hits."""
    stop, kinds = StopCriteria(max_tokens=40), sampled(len(prompts))
    found: list[GeneratedSample] = llm.generate(prompts, kinds, stop, top_logprobs=2)
    found += llm.generate(prompts, kinds, stop, prompt_logprobs=1)
    found += llm.generate(prompts, GREEDY, stop)
    for _ in range(2):
        found += llm.generate(prompts[1:2], GREEDY, stop)
    return [
        {
            "tokens": one.token_ids,
            "reason": str(one.finish_reason),
            "logprobs": [entry.logprob for entry in [*one.logprobs, *one.prompt_logprobs]],
        }
        for one in found
    ]


def greedy_texts(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy texts, for which a model needs no tokenizer."""
    stop = StopCriteria(max_tokens=24, ignore_eos=True)
    return [
        {"tokens": one.token_ids, "logprobs": [entry.logprob for entry in one.logprobs]}
        for one in llm.generate(prompts, GREEDY, stop, top_logprobs=1)
    ]


def moved_texts(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy texts, again and again, until twelve layers of experts have got random places."""
    shuffler, found = Shuffler(llm), list[dict[str, Any]]()
    while shuffler.num_changes < 12:
        found += greedy_texts(llm, prompts)
    return found


def company_texts(llm: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Greedy texts of the prompts together, then of each alone."""
    alone = [greedy_texts(llm, [prompt])[0] for prompt in prompts]
    return greedy_texts(llm, prompts) + alone


def adapted_texts(
    llm: LLM, prompts: list[list[int]], adapters: Sequence[Path | str]
) -> list[list[int]]:
    """Tokens of prompts that take turns with the adapters, the first with none."""
    named = [b"", *(llm.load_adapter(Path(path)) for path in adapters)]
    chosen = [named[row % len(named)] for row in range(len(prompts))]
    stop = StopCriteria(max_tokens=24, ignore_eos=True)
    return [one.token_ids for one in llm.generate(prompts, GREEDY, stop, adapters=chosen)]


def drafted_texts(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens of prompts, and what a head drafted behind which tokens."""
    noted = NotedChains(llm.engine, RandomGate((1, 3)))
    stop = StopCriteria(max_tokens=40, ignore_eos=True)
    samples = llm.generate(prompts, GREEDY, stop)
    return {"tokens": [one.token_ids for one in samples], "chains": noted.chains}


def lose_a_rank(llm: LLM, how: str) -> dict[str, Any]:
    """Kills or stops a rank under load; what is raised, and seconds after which it is."""
    children = psutil.Process().children()
    ranks = [one for one in children if "rank_process" in " ".join(one.cmdline())]
    lost_at = 0.0

    def strike() -> None:
        nonlocal lost_at
        lost_at = time.monotonic()
        os.kill(ranks[-1].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    timer = threading.Timer(1.0, strike)
    timer.start()
    try:
        while True:
            prompts = [[random.randrange(3, VOCAB) for _ in range(count)] for count in (50, 20)]
            llm.generate(prompts, stop=StopCriteria(max_tokens=60))
    except RanksLost as error:
        timer.join()
        return {"error": str(error), "seconds": time.monotonic() - lost_at}


def gpus_of_ranks(size: int, first: int = 0) -> str:
    """The GPU of each rank, from the given one on: its own, or one that it uses in turns with
    others where there are fewer.
    """
    count = torch.cuda.device_count()
    if size > count:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    return ",".join(f"cuda:{(first + rank) % count}" for rank in range(size))


def ranked(
    what: str,
    folder: Path,
    prompts: list[list[int]],
    adapters: Sequence[Path] = (),
    **settings: Any,
) -> dict[str, Any]:
    """Starts the process; its results."""
    if "device" not in settings:
        sizes = (settings.get(name, 1) for name in ("tp", "pp", "cp"))
        settings["device"] = gpus_of_ranks(math.prod(sizes))
    command = [sys.executable, "-m", __name__, what, str(folder)]
    command += [json.dumps(settings, default=str), json.dumps(prompts)]
    command += [json.dumps([str(path) for path in adapters])]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=300, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main(argv: list[str]) -> None:
    """Runs the engine."""
    what, folder, settings, prompts, adapters = argv
    found: dict[str, Any] = {}
    chosen = json.loads(settings)
    if "draft_dir" in chosen:
        chosen["draft_dir"] = Path(chosen["draft_dir"])
    with make_llm(Path(folder), **chosen) as llm:
        makers = {"texts": texts_of, "greedy": greedy_texts, "company": company_texts}
        makers["moved"] = moved_texts
        if what in makers:
            found["texts"] = makers[what](llm, json.loads(prompts))
            found["notices"] = llm.engine.info.notices
            found["counters"] = llm.engine.counters()
        elif what.startswith("drafted"):
            found |= drafted_texts(llm, json.loads(prompts))
            if what == "drafted-texts":
                found["texts"] = texts_of(llm, json.loads(prompts))
            found["counters"] = llm.engine.counters()
        elif what == "adapted":
            found["tokens"] = adapted_texts(llm, json.loads(prompts), json.loads(adapters))
        else:
            found |= lose_a_rank(llm, what)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
