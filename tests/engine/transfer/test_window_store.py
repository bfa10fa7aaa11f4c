"""Pages behind windows are freed beside a KV store, which has window pages as blocks of their own.
Texts are transformers' greedy ones; the store is a dictionary.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.contract.keys import PageKeys
from weft.contract.store import StorePutResult
from weft.engine.executor.local import LocalExecutor
from weft.engine.executor.orders import Order, PackPieces, UnpackPieces
from weft.engine.sources.store import HELD_SHARE
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.engine_storm import check_empty
from weft.testing.engine.store_pair import StorePair
from weft.testing.models.choices import Choices
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB, NUM_NEW = 8, 517, 6
WINDOW = 21
LENGTH = 16 * PAGE + 3
FULL = pytest.mark.full
LAYERS = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "qwen2": {"layer_types": [*LAYERS, LAYERS[0]], "num_hidden_layers": 5},
    "mistral": {"num_hidden_layers": 4},
}
"""A window page takes two pages of the store, the second half empty, or three."""


@pytest.fixture(params=["qwen2", pytest.param("mistral", marks=FULL)], scope="module")
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    fields = {"vocab_size": VOCAB, "sliding_window": WINDOW, "use_sliding_window": True}
    fields |= KINDS[request.param]
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"), seed, **fields)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@pytest.fixture
def pair(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StorePair]:
    monkeypatch.setattr("weft.engine.sources.store.LOOKUP_TIMEOUT_S", 60.0)
    settings = {"host_cache_bytes": 100_000} if random.random() < 0.5 else {}
    settings |= {"overlap": random.choice(["off", "on"])}
    print(settings)
    with pair_of(model_dir, **settings) as made:
        yield made


@contextlib.contextmanager
def pair_of(model_dir: Path, **settings: Any) -> Iterator[StorePair]:
    values: dict[str, Any] = {
        "transport": "data",
        "has_store": True,
        "window_pages": "free",
        "num_pages": 600,
        "load_back_threshold": 0,
        "prefill_chunk_tokens": 4 * PAGE,
        "poison_free_pages": True,
    }
    clock = ManualClock()
    owner = make_engine(model_dir, "decode", clock, **(values | settings))
    made = StorePair(owner, clock, WINDOW, NUM_NEW)
    try:
        yield made
        made.settle()
        check_empty(owner)
        (window,) = owner.parts.companions
        assert (len(window), window._reserved) == (0, (0, 0))
    finally:
        made.close()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    return Choices(lambda tokens: model(torch.tensor([tokens])).logits[0], prompt, NUM_NEW)


@pytest.mark.parametrize("count", [4, pytest.param(30, marks=FULL)])
def test_prompts_go_on_where_the_store_has_the_last_window(
    pair: StorePair, model: torch.nn.Module, count: int
) -> None:
    """Whatever pages of it vanish, and wherever a fill breaks."""
    stem = random_prompt(LENGTH)
    assert pair.ask(stem) == greedy(model, stem)
    pair.forget()
    num_pages = (LENGTH + NUM_NEW - 1) // PAGE
    namespace = pair.owner._intake.namespace("")
    keys = PageKeys(namespace, PAGE).upto(stem, LENGTH // PAGE)
    assert len(pair.held) == num_pages * (1 + len(pair.blocks_of(b"")))
    assert pair.continuable(keys) == len(keys)
    num_found = 0
    for number in range(count):
        if number:
            for key in keys:  # They are put again when a prompt finds them missing.
                if random.random() < 0.1:
                    pair.held.pop(random.choice(pair.blocks_of(key)), None)
        cut = random.randint(1, LENGTH) if number else LENGTH
        prompt = stem[:cut] + random_prompt(random.randint(1, PAGE))
        own = PageKeys(namespace, PAGE).upto(prompt, (len(prompt) - 1) // PAGE)
        found = pair.continuable(own)
        pair.most_sent = random.choice([None, None, random.randrange(20)])
        assert pair.ask(prompt) == greedy(model, prompt)
        fills = [fill for fill in pair.fills() if fill.source == "kvstore"]
        if pair.owner.tiers is None:
            assert [fill.end_token for fill in fills] == [found * PAGE] * bool(found)
        num_found += len(fills)
        pair.forget()
    assert num_found or pair.owner.tiers is not None


def test_a_queue_that_is_nearly_full_takes_the_last_window(
    pair: StorePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has room for as many window pages beside the pages of a prompt, but for the first one that
    the last step leaves.
    """
    monkeypatch.setattr("weft.engine.sources.store.GATHER_S", 1e9)
    size, step, need = len(pair.blocks_of(b"")), 4, -(-(WINDOW - 1) // PAGE)
    num_pages = LENGTH // PAGE
    wanted = num_pages + (num_pages - step + need) * size
    most = -(-(wanted - size + 1) // size)
    assert most * size <= wanted
    monkeypatch.setattr(pair.owner.parts.transport.port, "max_queued_pages", most, raising=False)
    prompt = random_prompt(LENGTH)
    pair.ask(prompt)
    pair.settle()
    keys = PageKeys(pair.owner._intake.namespace(""), PAGE).upto(prompt, num_pages)
    assert pair.continuable(keys) == num_pages
    assert pair.owner.store.counters.store_dropped_pages


def test_a_silent_store_holds_a_share_of_the_pool(
    model_dir: Path, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.engine.sources.store.LOOKUP_TIMEOUT_S", 60.0)
    with pair_of(model_dir, num_pages=121) as pair:
        pair.is_silent, store = True, pair.owner.store
        for _ in range(6):
            prompt = random_prompt(LENGTH)
            assert pair.ask(prompt) == greedy(model, prompt)
            # A window page is queued whole.
            assert store.num_open_pages < 120 // HELD_SHARE + len(pair.blocks_of(b""))
        assert store.counters.store_dropped_pages
        pair.run(lambda: all(put.digests for put in store._open.values()))
        pair.is_silent = False
        for number in list(store._open):
            pair.send(store_put_results=[StorePutResult(put=number, is_answered=False)])
        pair.settle()
        assert store.num_open_pages == 0


def test_window_pages_are_copied_at_once(
    pair: StorePair, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a prompt leaves several, and a fill brings a window of several: one copy each."""
    copied: list[tuple[type, int]] = []
    follow = LocalExecutor.order

    def noted(executor: LocalExecutor, order: Order) -> None:
        if isinstance(order, PackPieces | UnpackPieces):
            copied.append((type(order), len(order.pieces)))
        follow(executor, order)

    monkeypatch.setattr(LocalExecutor, "order", noted)
    num_pages = LENGTH // PAGE
    prompt = random_prompt(LENGTH)
    pair.ask(prompt)
    packed = [count for kind, count in copied if kind is PackPieces]
    assert sum(packed) == (LENGTH + NUM_NEW - 1) // PAGE
    assert len(packed) <= -(-num_pages // 4) + 1, "more copies than steps that filled pages"
    pair.forget()
    copied.clear()
    other = prompt[: num_pages * PAGE] + random_prompt(PAGE)
    assert pair.ask(other) == greedy(model, other)
    if pair.owner.tiers is None:
        window = -(-(WINDOW - 1) // PAGE)
        assert [count for kind, count in copied if kind is UnpackPieces] == [window]


def test_no_load_begins_before_copies_for_the_store_are_made(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loads write from other threads to pages that a copy may still read or zero on a device."""
    monkeypatch.setattr("weft.engine.sources.store.LOOKUP_TIMEOUT_S", 60.0)
    monkeypatch.setattr("weft.engine.sources.store.GATHER_S", 1e9)
    num_copied = num_waited = 0
    follow = LocalExecutor.order

    def noted(executor: LocalExecutor, order: Order) -> None:
        nonlocal num_copied
        num_copied += isinstance(order, PackPieces)
        follow(executor, order)

    class Marked:
        def __init__(self) -> None:
            self._num_copied = num_copied

        def wait(self) -> None:
            nonlocal num_waited
            num_waited = max(num_waited, self._num_copied)

    monkeypatch.setattr(LocalExecutor, "order", noted)
    monkeypatch.setattr(LocalExecutor, "mark", lambda executor: Marked())
    settings = {"host_cache_bytes": 8 << 20, "poison_free_pages": False, "overlap": "off"}
    with pair_of(model_dir, **settings) as pair:
        known, tiers = random_prompt(LENGTH), pair.owner.tiers
        pair.ask(known)
        pair.forget()
        pair.held.clear()
        write_back, begin_loads = tiers.write_back, tiers.begin_loads
        num_begun = num_late = 0

        def note_copies() -> None:
            nonlocal num_late
            num_late += bool(tiers.num_due and num_waited < num_copied)
            write_back()

        def begin() -> None:
            nonlocal num_begun
            if tiers.num_due:
                num_begun += 1
                assert num_waited == num_copied
            begin_loads()

        monkeypatch.setattr(tiers, "write_back", note_copies)
        monkeypatch.setattr(tiers, "begin_loads", begin)
        other = pair.submit(random_prompt(LENGTH), max_tokens=NUM_NEW)
        for _ in range(3):
            pair.turn()
        pair.ask(known)
        pair.finish(other)
        assert num_begun, "nothing was loaded"
        assert num_late, "no copy was under way"
