"""What happens on the host while a GPU's work is captured."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
from weft.engine.executor.graphs import without_collection


class _Cycle:
    """Garbage that only a collection finds, as an engine that is no more."""

    def __init__(self) -> None:
        self.itself = self


def make_garbage() -> weakref.ref[_Cycle]:
    return weakref.ref(_Cycle())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_meanwhile_and_all_is_afterwards(fails: bool) -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        with suppress(RuntimeError), without_collection():
            garbage = make_garbage()
            kept = [[index] for index in range(1000)]
            assert garbage() is not None
            if fails:
                raise RuntimeError
        assert gc.isenabled()
        kept = [[index] for index in range(1000)]
        assert len(kept) == 1000
        assert garbage() is None
    finally:
        gc.set_threshold(*threshold)


def test_who_collects_nothing_goes_on_so() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
