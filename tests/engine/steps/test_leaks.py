"""After thousands of random ends nothing is left: no page, slot, lease, fill, group or promise."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weft.contract import faults
from weft.contract.faults import FaultSpec
from weft.contract.request import SamplingParams
from weft.testing.engine.drafters import RandomGate
from weft.testing.engine.engine_pair import (
    WAYS,
    EnginePair,
    ManualClock,
    make_engine,
    num_quarantined,
)
from weft.testing.engine.engine_storm import Storm, Text, check_empty, make_texts, ride_out
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

PAGE = 8
VOCAB = 517
MAX_SAMPLES = 4
NUM_NEW = 14
NUM_REQUESTS = 200
MAX_OPEN = 24
STAGING_PAGES = 20
"""Fewer than what is under way at times."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("tiny"),
        seed=random.randrange(2**31),
        vocab_size=VOCAB,
        num_hidden_layers=1,
    )


@pytest.fixture(scope="module")
def texts(model_dir: Path) -> list[Text]:
    """What a quiet engine of its own makes of prompts that share prefixes."""
    clock = ManualClock()
    samplings = [
        SamplingParams(temperature=float(number % 2 == 0), seed=number, n=MAX_SAMPLES)
        for number in range(24)
    ]
    return make_texts(make_engine(model_dir, "decode", clock), clock, samplings, NUM_NEW)


def page_bytes(model_dir: Path) -> int:
    """Of a page of that model's pool, in float32."""
    config = json.loads((model_dir / "config.json").read_text())
    heads = config["num_key_value_heads"]
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * 4 * heads * dim * PAGE * int(config["num_hidden_layers"])


def arm_corruption(point: faults.FaultPoint, probability: float) -> None:
    """From now on flips a bit at the fault point with this probability, any number of times."""
    point.arm(FaultSpec(point=point.name, kind="corrupt", count=0, probability=probability))


@pytest.fixture(
    params=[
        *WAYS,
        pytest.param({"tiers": True}, id="tiers"),
        pytest.param({"drafts": True}, id="draft-model", marks=pytest.mark.full),
    ]
)
def storm(
    model_dir: Path, texts: list[Text], request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Storm]:
    clock = ManualClock()
    shared: dict[str, Any] = {"max_running_requests": 8, "prefill_chunk_tokens": 16}
    shared |= request.param
    # A report that the storm falsifies may come behind the one in NIXL's notification; the owner
    # then refuses it as a contradiction. A digest finds a flipped bit whatever comes first.
    arm_corruption(faults.FILL_DIGEST, 0.04)
    if "force_staging" in shared:
        shared["staging_bytes"] = STAGING_PAGES * page_bytes(model_dir)
    # Few pages of a small pool wait for puts: it is short of them all the same.
    if shared.pop("tiers", False):
        shared |= {"host_cache_bytes": 200 << 10, "disk_cache_dir": tmp_path}
        shared |= {"disk_cache_bytes": 300 << 10, "load_back_threshold": 0}
        for point in (faults.TIER_HOST, faults.TIER_DISK_READ):
            arm_corruption(point, 0.02)
    own: dict[str, Any] = {"num_pages": 44, "has_store": True}
    is_drafting = shared.pop("drafts", False)
    if is_drafting:
        own |= {"drafter": "model", "draft_dir": model_dir}
    owner = make_engine(model_dir, "decode", clock, **own, **shared)
    if is_drafting:
        owner.scheduler.running_plans.gate = RandomGate((0, 1, 3, 5))
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=48, worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    storm = Storm(owner, fillers, clock, texts, random.Random(seed))
    yield storm
    storm.close()
    for point in (faults.FILL_DIGEST, faults.TIER_HOST, faults.TIER_DISK_READ):
        point.clear()


def unseen(storm: Storm) -> list[str]:
    """What should have happened in a storm, and has not."""
    counters = storm.owner.counters()
    names = ["fills_done", "fills_failed", "digest_mismatches", "store_put_pages"]
    missing = [name for name in names if not counters[name]]
    engines = (storm.owner, *storm.fillers.values())
    reports = [report for e in engines if e.tiers is not None for report in e.tiers.report()]
    for name in ("loaded_pages", "corrupt_pages") if reports else ():
        if not sum(report.counters[name] for report in reports):
            missing.append(name)
    if storm.owner.drafter is not None and counters["accepted_tokens"] <= NUM_REQUESTS:
        missing.append("accepted drafts")
    return missing if storm.num_preempted else [*missing, "preemptions"]


@pytest.mark.each_of("overlap", "storm")
def test_random_ends_and_faults_leave_nothing(storm: Storm) -> None:
    ride_out(storm, NUM_REQUESTS, MAX_OPEN, lambda: not unseen(storm))
    for engine in (storm.owner, *storm.fillers.values()):
        check_empty(engine)
    counters = storm.owner.counters()
    print(storm.faults, counters)
    assert not unseen(storm)
    reasons = {reason for sent in storm.sent for told in sent.reasons.values() for reason in told}
    assert reasons == {"length", "cancelled"}


@pytest.mark.each_of("overlap", "pause", "staging_pages")
@pytest.mark.parametrize("staging_pages", [0, 10, 41])
@pytest.mark.parametrize("pause", ["short", "past its lease", "until all is over"])
def test_a_starved_pool_neither_deadlocks_nor_loses(
    model_dir: Path, texts: list[Text], pause: str, staging_pages: int
) -> None:
    """40 pages, 16 prompts of four samples each that need far more, and a filler that stands."""
    clock = ManualClock()
    staged = {
        "force_staging": staging_pages > 0,
        "staging_bytes": staging_pages * page_bytes(model_dir) or None,
    }
    owner = make_engine(model_dir, "decode", clock, num_pages=41, **staged)
    filler = make_engine(model_dir, "prefill", clock, **staged)
    pair = EnginePair(owner, [filler], clock)
    try:
        chosen = sorted(texts, key=lambda text: -len(text.prompt))[:16]
        needed = [-(-(len(text.prompt) + NUM_NEW) // PAGE) for text in chosen]
        assert sum(needed) > 2 * 40
        pair.paused.add("prefill")
        ids = [pair.submit(text.prompt, NUM_NEW, sampling=text.sampling) for text in chosen]

        def pass_time() -> None:
            clock.offset_s += 0.02
            pair.turn()

        for _ in range(50 if pause == "short" else 1000):
            pass_time()
        assert pair.owner.counters()["fills_started"]
        assert bool(num_quarantined(owner)) == (pause != "short")
        if pause != "until all is over":
            pair.paused.clear()
        deadline = time.monotonic() + 60
        while any(len(pair.answers[i].finished) < MAX_SAMPLES for i in ids):
            assert time.monotonic() < deadline, owner.snapshot(16)
            pass_time()
        for request_id, text in zip(ids, chosen, strict=True):
            tokens = pair.answers[request_id].tokens
            assert [tuple(tokens[i]) for i in range(MAX_SAMPLES)] == list(text.samples)
        assert owner.scheduler.num_preemptions
        pair.paused.clear()
        clock.offset_s += 30
        pair.settle()
        check_empty(owner)
        check_empty(filler)
    finally:
        pair.close()
