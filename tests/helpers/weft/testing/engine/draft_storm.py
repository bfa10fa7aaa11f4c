"""Storms on an owner that drafts, with two fillers and too few pages for all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.contract.request import SamplingParams
from weft.engine.sampling.sampler import derive_seed
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, Text, check_empty, make_texts, ride_out

NUM_TEXTS = 12
MAX_SAMPLES = 4
MAX_OPEN = 24


def samplings_of(temperatures: Sequence[float], **values: Any) -> list[SamplingParams]:
    """Sampling parameters of the texts of a storm, each with a seed of its own."""
    return [
        SamplingParams(
            temperature=temperatures[number % len(temperatures)],
            seed=number,
            n=MAX_SAMPLES,
            **values,
        )
        for number in range(NUM_TEXTS)
    ]


def draft_storm(
    model_dir: Path,
    samplings: Sequence[SamplingParams],
    num_new: int,
    *,
    drafter: str,
    draft_width: int = 1,
    draft_dir: Path | None = None,
    has_store: bool = True,
    **shared: Any,
) -> Storm:
    """Creates a storm that has not begun.

    Args:
        model_dir: Of the model.
        samplings: Of the texts.
        num_new: Tokens of each sample, at most.
        drafter: Of the owner.
        draft_width: Of the owner.
        draft_dir: Of the head whose entries all pages hold; None: there is none.
        has_store: Whether the owner has one.
        **shared: Settings of all engines.
    """
    clock = ManualClock()
    shared["prefill_chunk_tokens"] = 2 * shared.get("page_size", 8)
    quiet = make_engine(model_dir, "decode", clock, **(shared | {"overlap": "off"}))
    texts = make_texts(quiet, clock, samplings, num_new)
    shared |= {"max_running_requests": 8, "draft_dir": draft_dir}
    own = {"drafter": drafter, "draft_width": draft_width, "num_pages": 36, "has_store": has_store}
    owner = make_engine(model_dir, "decode", clock, **own, **shared)
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=48, worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return Storm(owner, fillers, clock, texts, random.Random(seed))


def known_of(texts: Sequence[Text]) -> dict[tuple[tuple[int, ...], int], list[int]]:
    """The known texts for `KnownDrafter`."""
    return {
        (text.prompt, derive_seed(text.sampling.seed, index)): [*text.prompt, *sample]
        for text in texts
        for index, sample in enumerate(text.samples)
    }


def check_storm(storm: Storm, count: int) -> None:
    """Rides it out, with drafts all along; nothing is left of it.

    Args:
        storm: That has not begun.
        count: Requests to send.
    """

    def has_seen_all() -> bool:
        seen = storm.owner.counters()
        kinds = (storm.faults["cancel"], storm.faults["cancel of a sample"], seen["fills_done"])
        return all(kinds) and storm.num_preempted > 0 and seen["accepted_tokens"] > count // 2

    ride_out(storm, count, MAX_OPEN, has_seen_all)
    for engine in (storm.owner, *storm.fillers.values()):
        check_empty(engine)
    counters = storm.owner.counters()
    print(storm.faults, counters)
    assert counters["speculated_steps"] > count // 2
    assert counters["drafted_tokens"] > counters["accepted_tokens"] > count // 2
    assert storm.num_preempted
    assert counters["fills_done"]
    assert storm.faults["cancel"]
    assert storm.faults["cancel of a sample"]
    told = [(sent, reasons) for sent in storm.sent for reasons in sent.reasons.values()]
    num_cut = sum(bool(sent.tokens) and "cancelled" in reasons for sent, reasons in told)
    # Of 120 requests some nine are cancelled in mid text, but in one storm of a hundred none is.
    assert num_cut or count < 200
