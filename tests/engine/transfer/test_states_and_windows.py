"""A model with recurrent layers and sliding windows: what workers exchange, tiers and stores keep
has states and window pages, and prompts continue where both are.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from weft.contract.keys import PageKeys, block_keys
from weft.contract.request import SamplingParams
from weft.engine.base.config import NEVER_SHIP_TOKENS
from weft.testing.engine.engine_pair import WAYS, EnginePair, ManualClock, make_engine
from weft.testing.engine.engine_storm import Storm, check_empty, make_texts, ride_out
from weft.testing.engine.store_pair import StorePair
from weft.testing.engine.tier_bench import NUM_NEW, VOCAB, TierBench, prompt_of
from weft.testing.models.every_family import greedy_tokens, load_reference
from weft.testing.models.families import make_family

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, WINDOW = 8, 24
LENGTH = 20 * PAGE + 3
FULL = pytest.mark.full
SETTINGS: dict[str, Any] = {
    "window_pages": "free",
    "checkpoint_tokens": 5 * PAGE,
    "prefill_chunk_tokens": 4 * PAGE,
    "max_step_tokens": 4 * PAGE,
    "max_running_requests": 2,
    "poison_free_pages": True,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    fields = {"vocab_size": VOCAB, "sliding_window": WINDOW}
    return make_family("lfm3", tmp_path_factory.mktemp("lfm3"), seed, **fields)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> Any:
    return load_reference(model_dir)


def check(engine: Any) -> None:
    check_empty(engine)
    assert [companion.name for companion in engine.parts.companions] == ["state", "window"]
    for companion in engine.parts.companions:
        assert (len(companion), companion._reserved) == (0, (0, 0))
        assert not companion.memory.counts().used
        companion.memory.check_integrity()
        if companion._index is not None:
            companion._index.check_integrity()


def sizes_of(engine: Any) -> tuple[int, int]:
    """Pages of a tier that a block takes, and that a window page takes."""
    layout = engine.parts.layout
    own, other = (group.page_bytes(PAGE) for group in layout.groups)
    return -(-layout.states.block_bytes // own), -(-other // own)


@contextlib.contextmanager
def bench_of(model_dir: Path, **settings: Any) -> Iterator[TierBench]:
    values: dict[str, Any] = SETTINGS | {
        "num_pages": 60,
        "host_cache_bytes": 8 << 20,
        "load_back_threshold": 0,
    }
    bench = TierBench(model_dir, LENGTH, **(values | settings))
    try:
        yield bench
        bench.settle()
        check(bench.engine)
    finally:
        bench.pair.close()


@pytest.mark.parametrize("threshold", [0, pytest.param(1, marks=FULL), 1000])
def test_prompts_continue_where_a_state_and_a_window_come_back(
    model_dir: Path, model: Any, threshold: int
) -> None:
    overlap = random.choice(["off", "on"])
    print(f"overlap {overlap}")
    with bench_of(model_dir, write_through_threshold=threshold, overlap=overlap) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy_tokens(model, prompt, NUM_NEW)
        for _ in range(2):
            assert bench.ask(prompt) == expected
        bench.push_out()
        assert bench.ask(prompt) == expected
        if threshold == 0:
            (fill,) = [fill for fill in bench.fills() if fill.source == "host"]
            assert (fill.end_token, fill.failure) == (20 * PAGE, "")
        for _ in range(4):
            parting = prompt[: random.randint(1, LENGTH)] + prompt_of(random.randint(1, 2 * PAGE))
            if random.random() < 0.5:
                bench.push_out()
            assert bench.ask(parting) == greedy_tokens(model, parting, NUM_NEW)
        assert not bench.counters("host")["corrupt_pages"]


def test_a_border_that_lacks_either_counts_for_nothing(model_dir: Path, model: Any) -> None:
    """Blocks are at the prompt's end and every five pages."""
    with bench_of(model_dir) as bench:
        prompt = prompt_of(LENGTH)
        expected = greedy_tokens(model, prompt, NUM_NEW)
        assert bench.ask(prompt) == expected
        tiers, (num_states, num_windows) = bench.engine.tiers, sizes_of(bench.engine)
        assert tiers is not None
        keys = PageKeys(bench.engine._intake.namespace("", b""), PAGE).upto(prompt, 20)
        dropped: list[bytes] = []  # They are saved again when a prompt finds them missing.
        # A page of the last window, then a block.
        for index, is_state, found in ((18, False, 15), (14, True, 10), (9, False, 5)):
            bench.push_out()
            beside = block_keys(keys[index], num_states + num_windows)
            dropped.append(random.choice(beside[:num_states] if is_state else beside[num_states:]))
            for key in dropped:
                tiers.host.drop(key)
            assert bench.ask(prompt) == expected
            fills = [fill for fill in bench.fills() if fill.source == "host"]
            assert fills[0].end_token == found * PAGE, (index, is_state)


def test_both_come_back_from_disk_after_a_restart(
    model_dir: Path, model: Any, tmp_path: Path
) -> None:
    prompt = prompt_of(LENGTH)
    expected = greedy_tokens(model, prompt, NUM_NEW)
    settings = {"disk_cache_dir": tmp_path, "disk_cache_bytes": 64 << 20}
    for number in range(2):
        with bench_of(model_dir, **settings) as bench:
            assert bench.ask(prompt) == expected
            if number:
                assert bench.fills()[0].source == "disk"
                assert sum(fill.accepted_tokens for fill in bench.fills())


@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_part_from_a_filled_one(
    model_dir: Path, model: Any, way: dict[str, Any]
) -> None:
    clock, values = ManualClock(), SETTINGS | {"num_pages": 120} | way
    owner = make_engine(model_dir, "decode", clock, **values)
    filler = make_engine(model_dir, "prefill", clock, **values)
    pair = EnginePair(owner, [filler], clock)
    try:
        base = prompt_of(LENGTH)
        for length in (LENGTH, *random.sample(range(1, LENGTH), 6)):
            prompt = base[:length] + prompt_of(random.randint(1, 5 * PAGE))
            (tokens,) = pair.finish(pair.submit(prompt, NUM_NEW))
            assert tokens == greedy_tokens(model, prompt, NUM_NEW)
        pair.settle()
        assert owner.counters()["fills_done"] > 1
        assert not owner.counters()["fills_failed"]
        for engine in (owner, filler):
            check(engine)
    finally:
        pair.close()


class Both(StorePair):
    """A store with blocks and window pages."""

    def pieces_of(self, key: bytes) -> tuple[list[bytes], list[bytes]]:
        """The store's names of the block and of the window page beside a page."""
        num_states, num_windows = sizes_of(self.owner)
        names = block_keys(key, num_states + num_windows)
        return names[:num_states], names[num_states:]

    def blocks_of(self, key: bytes) -> list[bytes]:
        return self.pieces_of(key)[1]

    def before_windows(self, key: bytes) -> list[bytes]:
        return self.pieces_of(key)[0]


@pytest.mark.parametrize("count", [5, pytest.param(30, marks=FULL)])
def test_prompts_continue_where_the_store_has_both(
    model_dir: Path, model: Any, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever pages of it vanish."""
    monkeypatch.setattr("weft.engine.sources.store.LOOKUP_TIMEOUT_S", 60.0)
    clock = ManualClock()
    values: dict[str, Any] = {"transport": "data", "has_store": True, "num_pages": 600}
    values["load_back_threshold"] = 0
    owner = make_engine(model_dir, "decode", clock, **(SETTINGS | values))
    pair = Both(owner, clock, WINDOW, NUM_NEW)
    try:
        stem = prompt_of(LENGTH)
        assert pair.ask(stem) == greedy_tokens(model, stem, NUM_NEW)
        pair.forget()
        namespace, num_found = owner._intake.namespace(""), 0
        keys = PageKeys(namespace, PAGE).upto(stem, LENGTH // PAGE)
        assert pair.continuable(keys) == len(keys)
        for number in range(count):
            for key in keys if number else ():  # They are put again when they are found missing.
                if random.random() < 0.1:
                    of_page = pair.pieces_of(key)
                    pair.held.pop(random.choice([*of_page[0], *of_page[1]]), None)
            cut = random.randint(1, LENGTH) if number else LENGTH
            prompt = stem[:cut] + prompt_of(random.randint(1, PAGE))
            own = PageKeys(namespace, PAGE).upto(prompt, (len(prompt) - 1) // PAGE)
            found = pair.continuable(own)
            assert pair.ask(prompt) == greedy_tokens(model, prompt, NUM_NEW)
            fills = [fill for fill in pair.fills() if fill.source == "kvstore"]
            assert [fill.end_token for fill in fills] == [found * PAGE] * bool(found)
            num_found += len(fills)
            pair.forget()
        assert num_found
        pair.settle()
        check(owner)
    finally:
        pair.close()


@FULL
@pytest.mark.parametrize("count", [150, 1000])
def test_a_storm(model_dir: Path, tmp_path: Path, count: int) -> None:
    """Fills, loads, cancels, samples and pre-emptions, with tiers on all workers."""
    clock = ManualClock()
    samplings = [SamplingParams(temperature=float(i % 2 == 0), seed=i, n=4) for i in range(12)]
    alone = {"transport": "data", "local_prefill_max_tokens": NEVER_SHIP_TOKENS}
    quiet = make_engine(model_dir, "decode", clock, overlap="off", window_pages="keep", **alone)
    texts = make_texts(quiet, clock, samplings, 30)
    shared: dict[str, Any] = SETTINGS | {
        "max_running_requests": 4,
        "max_step_tokens": 32,
        "prefill_chunk_tokens": 16,
        "overlap": random.choice(["off", "on"]),
        "host_cache_bytes": random.choice([200, 600]) << 10,
        "load_back_threshold": 0,
        "write_through_threshold": random.choice([0, 0, 1, 1000]),
    }
    if random.random() < 0.5:
        shared |= {"disk_cache_dir": tmp_path, "disk_cache_bytes": 4 << 20}
    print(shared)
    owner = make_engine(
        model_dir, "decode", clock, num_pages=60, has_store=random.random() < 0.7, **shared
    )
    fillers = [
        make_engine(model_dir, "prefill", clock, num_pages=80, worker_id=name, **shared)
        for name in ("p0", "p1")
    ]
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    storm, tiers = Storm(owner, fillers, clock, texts, random.Random(seed)), owner.tiers
    assert tiers is not None

    def has_seen_all() -> bool:
        loaded = sum(tier.counters["loaded_pages"] for tier in tiers.report())
        return owner.counters()["fills_done"] > 0 and loaded > 0

    try:
        ride_out(storm, count, 24, has_seen_all)
        for engine in (owner, *fillers):
            check(engine)
        print(storm.faults, owner.counters())
        assert has_seen_all()
    finally:
        storm.close()
