"""Prompts whose pages come from a KV store layer by layer, and loads that fail then.

Texts are compared with transformers' greedy generation, which caches nothing. Free pages hold NaN,
so a layer that is read too early spoils the text. The store's pages lie in another process, from
whose memory NIXL reads.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.contract.store import StoreHeld
from weft.contract.submits import Cancel
from weft.engine.loop import pipeline
from weft.engine.loop.engine import Engine
from weft.engine.sources import store_layers
from weft.engine.sources.store_layers import StoreLayers
from weft.testing.engine.engine_pair import ManualClock, make_engine
from weft.testing.engine.held_store import HeldStorePair
from weft.testing.engine.waiting_steps import WaitingSteps, wait_long
from weft.testing.models.choices import GreedyReference
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("nixl")

PAGE, NUM_LAYERS, VOCAB, NUM_NEW = 8, 5, 517, 6
LENGTH = 40 * PAGE + 3
FAULTS = (
    *("bad page", "bad digest", "killed", "killed later", "silent", "not held", "fewer"),
    *("bad agent", "other version", "refused", "late", "moved"),
)
UNREADABLE = {"killed", "killed later", "silent", "bad agent", "other version", "refused"}
"""Those after which the store is not asked for a while."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": VOCAB, "num_hidden_layers": NUM_LAYERS}
    made = tmp_path_factory.mktemp("llama")
    return make_tiny("llama", made, seed=random.randrange(2**31), **sizes)


@pytest.fixture(scope="module")
def reference(folder: Path) -> GreedyReference:
    return GreedyReference(folder, NUM_NEW)


class Pair(HeldStorePair):
    """Knows the steps that wait for layers."""

    def __init__(self, owner: Engine, clock: ManualClock) -> None:
        super().__init__(owner, clock, NUM_NEW)
        self.waiting_steps = WaitingSteps(owner)


@contextmanager
def pair_of(folder: Path, **settings: Any) -> Iterator[Pair]:
    values = {
        "has_store": True,
        "transport": "nixl",
        "load_by_layer": "always",
        "load_back_threshold": 0,
        "prefill_chunk_tokens": 4 * PAGE,
    }
    clock = ManualClock()
    pair = Pair(make_engine(folder, "decode", clock, **(values | settings)), clock)
    try:
        yield pair
        pair.settle()
        assert pair.holds == set()
        counts = pair.owner.memory.counts()
        assert counts.used == counts.quarantined == 0
    finally:
        pair.close()


def prompt_of(length: int = LENGTH) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def continued(prompt: list[int]) -> list[int]:
    end = random.randrange(10 * PAGE, len(prompt))
    return prompt[:end] + prompt_of(random.randrange(3, 12 * PAGE))


@pytest.mark.parametrize("overlap", ["on", pytest.param("off", marks=pytest.mark.full)])
def test_texts_are_those_of_no_cache(
    folder: Path, reference: GreedyReference, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_long(monkeypatch)
    with pair_of(folder, overlap=overlap) as pair:
        prompt = prompt_of()
        assert pair.ask(prompt) == reference(prompt)
        for _ in range(3):
            pair.forget()
            again = continued(prompt)
            assert pair.ask(again) == reference(again)
            (fill,) = pair.fills()
            assert (fill.source, fill.transport, fill.failure) == ("kvstore", "nixl", "")
            assert fill.accepted_tokens == fill.end_token - fill.start_token > 0
        assert pair.num_holds == 3
        assert pair.waiting_steps.count == 3


@pytest.mark.full
def test_pages_of_host_memory_and_of_a_store_both_come_by_layer(
    folder: Path, reference: GreedyReference
) -> None:
    with pair_of(folder, host_cache_bytes=16 << 20) as pair:
        prompt = prompt_of()
        pair.ask(prompt)
        pair.forget()
        assert pair.ask(prompt) == reference(prompt)
        assert [fill.source for fill in pair.fills()] == ["host"]
        tiers = pair.owner.tiers
        assert tiers is not None
        pair.forget()
        tiers.flush()
        assert pair.ask(prompt) == reference(prompt)
        assert [fill.source for fill in pair.fills()] == ["kvstore"]
        assert pair.num_holds == 1


@pytest.mark.full
def test_no_page_is_published_before_the_last_layer_has_come(
    folder: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for the second group meanwhile."""
    with pair_of(folder) as pair:
        prompt = prompt_of()
        pair.ask(prompt)
        pair.forget()
        layers, waited = pair.owner.parts.layer_pool, threading.Event()
        copy, wait = StoreLayers.copy, layers.waits.wait
        published: list[int] = []

        def late(self: StoreLayers, group: int) -> bool:
            if group == 1:
                assert waited.wait(30.0), "no step reads layers that have come"
            memory = pair.owner.memory
            published.extend(page for page in self.pages if memory.is_published(page))
            return copy(self, group)

        def tell(layer: int) -> None:
            if layer == layers.waits.groups[1].start:
                waited.set()
            wait(layer)

        monkeypatch.setattr(StoreLayers, "copy", late)
        monkeypatch.setattr(layers.waits, "wait", tell)
        monkeypatch.setattr(layers.waits, "_timeout_s", 30.0)
        assert pair.ask(prompt) == reference(prompt)
        assert waited.is_set()
        assert published == []
        assert pair.owner.memory.counts().cached >= LENGTH // PAGE


def strike(pair: Pair, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next load from the store fail."""
    group = random.randrange(1, NUM_LAYERS)
    copy = StoreLayers.copy

    def held_as(**changes: Any) -> None:
        pair.on_held = lambda held: replace(held, **changes)

    def at_group(do: Any) -> None:
        def copied(self: StoreLayers, at: int) -> bool:
            if at == group:
                do()
            return copy(self, at)

        monkeypatch.setattr(StoreLayers, "copy", copied)

    def half(held: StoreHeld) -> StoreHeld:
        return replace(held, pages=held.pages[:5], digests=held.digests[:5])

    def other(held: StoreHeld) -> StoreHeld:
        digests = list(held.digests)
        digests[random.randrange(len(digests))] ^= 1
        return replace(held, digests=digests)

    match kind:
        case "bad page":
            pair.on_held = lambda held: pair.spoil(random.choice(held.pages)) or held
        case "bad digest":
            pair.on_held = other
        case "killed":
            pair.on_held = lambda held: pair.kill() or held
        case "killed later":
            at_group(pair.kill)
        case "silent":
            pair.on_held = lambda held: None
            monkeypatch.setattr(store_layers, "HOLD_TIMEOUT_S", 0.0)
        case "not held":
            held_as(pages=[], digests=[])
        case "fewer":
            pair.on_held = half
        case "bad agent":
            held_as(agent_metadata=random.randbytes(100))
        case "other version":
            held_as(nixl_version="0")
        case "refused":
            pair.on_held = lambda held: StoreHeld(hold=held.hold)
        case "late":
            waits = pair.owner.parts.layer_pool.waits
            left = threading.Event()
            wait = waits.wait

            def tell(layer: int) -> None:
                wait(layer)
                if waits.was_left:
                    left.set()

            monkeypatch.setattr(waits, "_timeout_s", 0.02)
            monkeypatch.setattr(waits, "wait", tell)
            monkeypatch.setattr(pipeline, "INCOMING_TIMEOUT_S", 30.0)
            at_group(lambda: left.wait(30.0))
        case "moved":
            pair.on_held = lambda held: replace(held, pages=[*held.pages[1:], held.pages[0]])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param([None] * 2, id="two"),
        pytest.param(FAULTS, marks=pytest.mark.full, id="each"),
        pytest.param([None] * 200, marks=pytest.mark.full, id="200"),
    ],
)
def test_faults_of_loads_spoil_no_text(
    folder: Path, reference: GreedyReference, kinds: list[str | None]
) -> None:
    with pair_of(folder) as pair:
        for kind in kinds:
            kind = kind or random.choice(FAULTS)
            pair.forget()
            pair.forget_all()
            prompt = prompt_of()
            assert pair.ask(prompt) == reference(prompt)
            pair.forget()
            num_holds = pair.num_holds
            again = continued(prompt)
            with pytest.MonkeyPatch.context() as patch:
                strike(pair, kind, patch)
                assert pair.ask(again) == reference(again), kind
            assert pair.num_holds == num_holds + 1
            first = pair.fills()[0]
            assert first.failure, kind
            assert first.accepted_tokens == 0
            # The request has got its pages whole, or computed them.
            pair.on_held = lambda held: held
            pair.settle()
            assert pair.holds == set()
            if not pair.process.is_alive():
                pair.begin()
            num_holds = pair.num_holds
            if kind in UNREADABLE:
                pair.forget()
                assert pair.ask(again) == reference(again), kind
                assert [(fill.source, fill.failure) for fill in pair.fills()] == [("kvstore", "")]
                assert pair.num_holds == num_holds, kind
                pair.clock.offset_s += store_layers.REST_S
            pair.forget()
            assert pair.ask(again) == reference(again)
            assert pair.num_holds == num_holds + 1, kind
        assert pair.waiting_steps.count > 0


@pytest.mark.full
def test_a_request_that_is_cancelled_while_its_pages_come_leaves_nothing(
    folder: Path, reference: GreedyReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair_of(folder) as pair:
        prompt = prompt_of()
        pair.ask(prompt)
        pair.forget()
        may_end, copy = threading.Event(), StoreLayers.copy

        def stand(self: StoreLayers, group: int) -> bool:
            if group == 1:
                assert may_end.wait(60.0)
            return copy(self, group)

        monkeypatch.setattr(StoreLayers, "copy", stand)
        monkeypatch.setattr(pair.owner.parts.layer_pool.waits, "_timeout_s", 0.05)
        monkeypatch.setattr(pipeline, "INCOMING_TIMEOUT_S", 0.05)
        asked = pair.submit(prompt, max_tokens=NUM_NEW)
        pair.run(lambda: pair.waiting_steps.count > 0)
        pair.send(cancels=[Cancel(gateway=1, request_id=asked, attempt=1)])
        pair.run(lambda: bool(pair.answers[asked].finished))
        assert pair.owner.memory.counts().used >= LENGTH // PAGE
        may_end.set()
        pair.settle()
        assert pair.owner.memory.counts().used == 0
        assert pair.ask(prompt) == reference(prompt)
