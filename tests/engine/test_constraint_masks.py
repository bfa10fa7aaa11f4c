"""Masks of a step: made in a thread, each for itself, and never waited for without a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from weft.engine.constraints import masks
from weft.engine.constraints.masks import ConstraintState, Mask, MaskJob, MaskMaker
from weft.engine.errors import Internal, InvalidRequest


class FakeState:
    """A sample whose next mask is its first token, unless it does something else."""

    def __init__(self, error: Exception | None = None, wait: threading.Event | None = None) -> None:
        self.error = error
        self.wait = wait
        self.num_calls = 0
        self.is_lost = False

    def next_mask(self, tokens: Sequence[int]) -> Mask | None:
        self.num_calls += 1
        if self.wait is not None:
            self.wait.wait(60)
        if self.error is not None:
            raise self.error
        return np.array(tokens[:1], np.uint32) if tokens else None


def job(state: FakeState, *tokens: int) -> MaskJob:
    return MaskJob(cast(ConstraintState, state), tokens)


def test_each_sample_gets_its_mask_or_its_error() -> None:
    maker = MaskMaker()
    broken = FakeState(Internal("broken", stage="decode"))
    maker.begin([job(FakeState(), 7), job(broken, 1), job(FakeState()), job(FakeState(), 9)])
    first, second, third, fourth = maker.take()
    assert isinstance(first, np.ndarray)
    assert first[0] == 7
    assert isinstance(second, Internal)
    assert third is None
    assert isinstance(fourth, np.ndarray)
    assert fourth[0] == 9
    maker.close()


def test_a_grammar_that_never_answers_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TIMEOUT_S", 0.3)
    release = threading.Event()
    lost, behind = FakeState(wait=release), FakeState()
    maker = MaskMaker()
    for _ in range(2):  # What is lost stays so: its thread is still there.
        maker.begin([job(FakeState(), 1), job(lost), job(behind, 2), job(FakeState(), 3)])
        first, second, third, fourth = maker.take()
        assert isinstance(second, InvalidRequest)
        assert second.param == "constraint"
        values = [m[0] for m in (first, third, fourth) if isinstance(m, np.ndarray)]
        assert values == [1, 2, 3]
    release.set()
    maker.begin([job(FakeState(), 5)])
    (mask,) = maker.take()
    assert isinstance(mask, np.ndarray)
    # What was given up did not go on with the samples behind it.
    assert behind.num_calls == 2
    assert lost.num_calls == 1
    maker.close()


def test_many_masks_may_take_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TIMEOUT_S", 1.0)

    class Slow(FakeState):
        def next_mask(self, tokens: Sequence[int]) -> Mask | None:
            time.sleep(0.4)
            return super().next_mask(tokens)

    maker = MaskMaker()
    maker.begin([job(Slow(), number) for number in range(6)])
    assert [mask[0] for mask in maker.take() if isinstance(mask, np.ndarray)] == list(range(6))
    maker.close()
