"""A filler has room for the states of a prompt before it computes the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.contract.timeline import FillCandidate
from weft.engine.loop import carriers
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_hybrid import greedy, make_hybrid, reference_hybrid, serve_hybrid

pytestmark = pytest.mark.usefixtures("single_thread")

PAGE, VOCAB, LENGTH = 8, 517, 10


@pytest.fixture(scope="module", autouse=True)
def _hybrid() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        serve_hybrid(patch)
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, seed: int) -> Path:
    return make_hybrid(tmp_path_factory.mktemp("hybrid"), seed)


@pytest.fixture(scope="module")
def model(model_dir: Path) -> torch.nn.Module:
    return reference_hybrid(model_dir)


@pytest.mark.parametrize("num_at_once", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_no_prompt_is_computed_in_vain(
    model_dir: Path, model: torch.nn.Module, num_at_once: int
) -> None:
    """There is room for so many prompts of four with the states behind them: the others wait, or
    all are declined at once.
    """
    clock, values = ManualClock(), dict[str, Any](transport="data", max_running_requests=4)
    owner = make_engine(model_dir, "decode", clock, **values)
    assert owner.fills.packer is not None
    of_block = owner.fills.packer.num_pages
    each = max(1, num_at_once) * (LENGTH + of_block) - (num_at_once == 0)
    filler = make_engine(model_dir, "prefill", clock, num_pages=1 + each, **values)
    pair = EnginePair(owner, [filler], clock)
    try:
        prompts = [[random.randrange(3, VOCAB) for _ in range(LENGTH * PAGE + 1)] for _ in range(4)]
        requests = [pair.submit(prompt, 5) for prompt in prompts]
        assert pair.finish(*requests) == [greedy(model, prompt, 5) for prompt in prompts]
        pair.settle()
        counters, own = filler.counters(), owner.counters()
        if num_at_once:
            assert own["fills_done"] == 4
            assert not own["fills_failed"]
        else:
            assert own["fills_declined"] == own["fills_failed"] == 4
            assert not counters["computed_tokens"]
    finally:
        pair.close()


@pytest.mark.parametrize("has_filler", [False, True])
def test_a_load_without_room_leaves_its_store(
    model_dir: Path,
    model: torch.nn.Module,
    has_filler: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A store has no states before its last page, so a load has room for all or does not begin;
    the cost rule then decides about other fillers.
    """
    clock, values = ManualClock(), dict[str, Any](local_prefill_max_tokens=2 * LENGTH * PAGE)
    owner = make_engine(model_dir, "decode", clock, **values)
    fillers = [make_engine(model_dir, "prefill", clock, **values)] if has_filler else []
    pair = EnginePair(owner, fillers, clock)
    try:
        most = owner.fills.num_companion_pages + LENGTH // 2
        monkeypatch.setattr(owner.fills, "_room", lambda: (most, most))
        prompt = [random.randrange(3, VOCAB) for _ in range(LENGTH * PAGE + 1)]
        store = FillCandidate(
            worker_id="s", address="s", epoch=1, match_tokens=LENGTH * PAGE, kind="kvstore"
        )
        others = [pair.candidate(name) for name in pair.fillers]
        request = pair.submit(prompt, 5, [store, *others])
        assert pair.finish(request) == [greedy(model, prompt, 5)]
        pair.settle()
        assert not pair.commands
    finally:
        pair.close()


def test_states_that_no_store_takes_are_told_of(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carriers, "MAX_STORED_BLOCK_PAGES", 1)
    engine = make_engine(model_dir, "decode", ManualClock(), has_store=True)
    try:
        assert engine.store is None
        assert any("page_size" in notice for notice in engine.info.notices)
    finally:
        engine.close()
