"""Kills, stops and pauses of single ranks under load, also of ranks that divide pages."""

from __future__ import annotations

import contextlib
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from weft.contract.errors import RanksLost
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.tiny_models import make_tiny

pytestmark = [pytest.mark.usefixtures("single_thread"), pytest.mark.full]

VOCAB, LIMIT_S = 517, 4.0
LATE_S = 5.0
"""Time that a busy machine may take beyond the limit."""
STOP = StopCriteria(max_tokens=24, ignore_eos=True)
LOST = re.compile(r"rank [1-3] .*(signal 9|has not come to) ?(sum|room|the end|a step)?")


class Texts:
    """Prompts, and what one rank answers."""

    def __init__(self, folder: Path) -> None:
        shared = [random.randrange(3, VOCAB) for _ in range(40)]
        lengths = random.sample(range(1, 110), 12)
        self._prompts = [
            (shared + [random.randrange(3, VOCAB) for _ in range(n)])[-n:] for n in lengths
        ]
        seeds = [random.randrange(1 << 60) for _ in lengths]
        greedy = SamplingParams(temperature=0.0)
        self._kinds = [
            random.choice((greedy, SamplingParams(temperature=0.8, top_k=20, seed=seed)))
            for seed in seeds
        ]
        with make_llm(folder) as llm:
            self._expected = self._ask(llm, range(len(lengths)))

    def _ask(self, llm: LLM, chosen: Any) -> list[list[int]]:
        prompts = [self._prompts[number] for number in chosen]
        kinds = [self._kinds[number] for number in chosen]
        return [sample.token_ids for sample in llm.generate(prompts, kinds, STOP)]

    def check(self, llm: LLM) -> None:
        """Asks some of them at once."""
        chosen = random.sample(range(len(self._prompts)), random.randint(1, 8))
        assert self._ask(llm, chosen) == [self._expected[number] for number in chosen]


def make_llm(folder: Path, **settings: Any) -> LLM:
    """An engine with drafts, and too few pages for all prompts."""
    sizes: dict[str, Any] = {"page_size": 8, "num_pages": 48, "max_running_requests": 8}
    sizes |= {"prefill_chunk_tokens": 24, "max_step_tokens": 48, "poison_free_pages": True}
    drafts = {"drafter": "ngram", "draft_gate": "fixed", "max_draft_tokens": 3}
    return LLM(folder, dtype="float32", rank_timeout_s=LIMIT_S, **sizes, **drafts, **settings)


class Strike:
    """A fault of one rank after a while: it is killed, stopped for good or stopped for a moment."""

    def __init__(self, ranks: list[psutil.Process]) -> None:
        self.kind = random.choice(("kill", "stop", "pause"))
        self.at_s = float("inf")
        self.is_over = threading.Event()
        self._victim = random.choice(ranks)
        self._timer = threading.Timer(random.uniform(0.0, 1.0), self._act)
        self._timer.start()

    def _act(self) -> None:
        self.at_s = time.monotonic()
        self._victim.send_signal(signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)
        if self.kind == "pause":
            time.sleep(random.uniform(0.05, LIMIT_S / 4))
            self._victim.send_signal(signal.SIGCONT)
        self.is_over.set()

    def join(self) -> None:
        """Waits until it has happened."""
        self._timer.join()


def check_pages(llm: LLM) -> None:
    """No request holds a page, and every page is free or cached."""
    while llm.engine.has_work:
        llm.engine.turn()
    llm.engine.memory.check_integrity()
    assert llm.engine.memory.counts().used == 0


@contextlib.contextmanager
def ranked(folder: Path, size: int, dcp: int) -> Iterator[tuple[LLM, list[psutil.Process]]]:
    """An engine of several ranks, and the processes of those that can be hit."""
    before = set(psutil.Process().children())
    with make_llm(folder, tp=size, dcp=dcp) as llm:
        ranks = [one for one in psutil.Process().children() if one not in before]
        assert len(ranks) == size - 1
        yield llm, ranks
    assert set(psutil.Process().children()) <= before


def strike_until_lost(folder: Path, size: int, texts: Texts, most: int, dcp: int) -> list[str]:
    """Strikes ranks of one engine, until it ends; what was struck, and where that was noticed."""
    struck: list[str] = []
    with ranked(folder, size, dcp) as (llm, ranks):
        while len(struck) < most:
            strike = Strike(ranks)
            lost = load_until(strike, llm, texts)
            took_s = time.monotonic() - strike.at_s
            strike.join()
            if lost:
                found = LOST.match(lost)
                assert found is not None, lost
                assert strike.kind == ("kill" if "signal 9" in lost else "stop"), lost
                assert took_s < LIMIT_S * (strike.kind == "stop") + LATE_S
                with pytest.raises(RanksLost):
                    llm.engine.turn()
                return [*struck, f"{strike.kind} of {size}, noticed at {found[2] or 'its end'}"]
            texts.check(llm)
            check_pages(llm)
            struck.append(f"pause of {size}")
    return struck


def load_until(strike: Strike, llm: LLM, texts: Texts) -> str:
    """Sends requests until a rank is lost or a pause is over; returns how the rank was lost."""
    try:
        while not strike.is_over.is_set() or strike.kind != "pause":
            texts.check(llm)
    except RanksLost as lost:
        return str(lost)
    return ""


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_strikes", "divides"), [(100, False), (40, True)])
def test_ranks_that_are_struck_at_any_moment_make_the_right_texts_or_none(
    num_strikes: int, divides: bool, tmp_path: Path, seed: int
) -> None:
    """One that is gone or stays away ends the engine within its limit; one that comes back in time
    changes nothing, and costs no page.
    """
    model = {"vocab_size": VOCAB, "num_attention_heads": 8}
    model |= {"num_key_value_heads": 1} if divides else {}
    folder = make_tiny("qwen3", tmp_path / "model", seed, tokenizer=True, **model)
    texts, struck = Texts(folder), Counter[str]()
    while (left := num_strikes - struck.total()) > 0:
        size = random.choice((2, 4))
        dcp = size if divides else 1
        struck.update(strike_until_lost(folder, size, texts, left, dcp))
        print(struck.total(), flush=True)
    for what, count in sorted(struck.items()):
        print(f"{count:3d} {what}")
    assert {what.split()[0] for what in struck} == {"kill", "stop", "pause"}
