"""Ranks with a GPU each make the tokens of one GPU, and end together."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from weft.engine.base.errors import RanksLost
from weft.engine.base.request import Constraint, SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.float32_reference import ties_of
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.needs("cuda"), pytest.mark.whole_device]

VOCAB, LIMIT_S = 517, 3.0
GREEDY = SamplingParams(temperature=0.0)
SIZES = {"num_attention_heads": 8, "moe_intermediate_size": 64, "head_dim": 64}


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"cuda: {torch.cuda.device_count()} GPUs, of which this needs {count}")


def make_model(kind: str, folder: Path) -> Path:
    seed = random.randrange(1 << 30)
    return make_tiny(kind, folder, seed, tokenizer=True, vocab_size=VOCAB, **SIZES)


def make_llm(folder: Path, **settings: Any) -> LLM:
    sizes = {"page_size": 16, "prefill_chunk_tokens": 64, "max_step_tokens": 96, "num_pages": 60}
    sizes |= {"max_running_requests": 6, "rank_timeout_s": LIMIT_S, "poison_free_pages": True}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, **{"device": "cuda", "dtype": "float32"} | sizes | drafts | settings)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    shared = [random.randrange(3, VOCAB) for _ in range(40)]
    return [(shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths]


def sampled(rows: int) -> list[SamplingParams]:
    """Greedy, drawn, penalised and constrained ones, and ones that repeat themselves."""
    kinds = (
        GREEDY,
        SamplingParams(temperature=0.8, top_k=20, seed=random.randrange(1 << 60)),
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, constraint=Constraint(kind="regex", text="[ab]{3,9}c")),
        replace(GREEDY, logit_bias=dict.fromkeys((7, 8, 9), 50.0)),
    )
    return [kinds[row % len(kinds)] for row in range(rows)]


def run(llm: LLM, prompts: list[list[int]], kinds: list[SamplingParams]) -> list[GeneratedSample]:
    stop = StopCriteria(max_tokens=40)
    first = llm.generate(prompts, kinds, stop, top_logprobs=2)
    again = llm.generate(prompts, kinds, stop, prompt_logprobs=1)
    plain = llm.generate(prompts, GREEDY, stop)
    hits = [llm.generate(prompts[1:2], GREEDY, stop)[0] for _ in range(2)]
    return first + again + plain + hits


@pytest.mark.parametrize(("kind", "size"), [("llama", 2), ("qwen3_moe", 2), ("llama", 4)])
def test_texts_are_those_of_one_rank(kind: str, size: int, tmp_path: Path) -> None:
    needs_gpus(size)
    folder = make_model(kind, tmp_path / "model")
    prompts = random_prompts((5, 90, 41, 177, 12, 63, 100, 33, 54))
    kinds = sampled(len(prompts))
    with make_llm(folder) as llm:
        alone = run(llm, prompts, kinds)
    with make_llm(folder, tp=size) as llm:
        (notice,) = (text for text in llm.engine.info.notices if "tensor parallel" in text)
        assert f"{size} ranks" in notice
        together = run(llm, prompts, kinds)
        counters = llm.engine.counters()
    for name in ("accepted_tokens", "prefix_hit_tokens"):
        assert counters[name] > 0, (name, counters)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    for one, other in zip(alone, together, strict=True):
        assert other.finish_reason == one.finish_reason
        for mine, right in zip(
            [*other.logprobs, *other.prompt_logprobs],
            [*one.logprobs, *one.prompt_logprobs],
            strict=True,
        ):
            assert mine.logprob == pytest.approx(right.logprob, abs=1e-3)


def test_bfloat16_tokens_differ_from_float32_at_near_ties_only(tmp_path: Path) -> None:
    needs_gpus(2)
    folder = make_model("llama", tmp_path / "model")
    prompts = random_prompts((1, 30, 150, 64, 9, 200))
    with make_llm(folder, tp=2, dtype="bfloat16", drafter="none") as llm:
        samples = llm.generate(prompts, stop=StopCriteria(max_tokens=60, ignore_eos=True))
    ties_of(folder, prompts, [sample.token_ids for sample in samples]).check(is_moe=False)


def generate_on_and_on(llm: LLM) -> None:
    while True:
        llm.generate(random_prompts((50, 20)), stop=StopCriteria(max_tokens=60))


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_that_is_lost_ends_the_engine_in_time(how: str, tmp_path: Path) -> None:
    needs_gpus(2)
    folder = make_model("llama", tmp_path / "model")
    # With as many pages as the memory has room for.
    with make_llm(folder, tp=2, num_pages=None, device_memory_share=0.1) as llm:
        ranks = [one for one in psutil.Process().children() if "follow" in " ".join(one.cmdline())]
        lost_at = 0.0

        def strike() -> None:
            nonlocal lost_at
            lost_at = time.monotonic()
            os.kill(ranks[-1].pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)

        timer = threading.Timer(1.0, strike)
        timer.start()
        wanted = {"killed": "signal 9", "stopped": "has not come"}[how]
        with pytest.raises(RanksLost, match=f"rank 1.*{wanted}"):
            generate_on_and_on(llm)
        timer.join()
        assert time.monotonic() - lost_at < LIMIT_S + 5
    assert not any(rank.is_running() for rank in ranks)
