"""Reads of other processes' memory whose end cannot be told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from weft.pages.transfer.nixl_binding import load_binding
from weft.pages.transfer.nixl_ranges import MemoryRange, RangesReader, SharedRanges
from weft.pages.transfer.nixl_wire import TransferError

pytestmark = pytest.mark.needs("nixl")


@pytest.mark.parametrize("problem", [None, TransferError("the source is gone"), OSError("no room")])
def test_an_agent_that_lives_on_may_still_write(
    problem: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    kept = list[Any]()

    def keep(self: RangesReader, *_: Any) -> None:
        kept.append(self._agent.agent)
        if problem is not None:
            raise problem

    monkeypatch.setattr(RangesReader, "_copy", keep)
    shared = SharedRanges("source", [_range(theirs)])
    reader = RangesReader("bytes", most_bytes=64, stall_s=20.0)
    with pytest.raises(TransferError, match="cannot be ended") as found:
        reader.read(shared.target, [(_range(own), _range(theirs))])
    assert found.value.may_still_arrive
    kept.clear()
    del found
    assert reader.close()
    shared.close()


@pytest.mark.parametrize("failing", ["initialize_xfer", "transfer", "check_xfer_state"])
def test_a_read_that_fails_ends_the_agent(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a caller may use the memory for something else."""
    own, theirs = np.zeros(64, np.uint8), np.zeros(64, np.uint8)

    def fail(*_: Any) -> None:
        raise RuntimeError("disconnected")

    monkeypatch.setattr(load_binding()._api.nixl_agent, failing, fail)
    shared = SharedRanges("source", [_range(theirs)])
    reader = RangesReader("bytes", most_bytes=64, stall_s=20.0)
    with pytest.raises(TransferError, match="reading bytes: RuntimeError disconnected") as found:
        reader.read(shared.target, [(_range(own), _range(theirs))])
    assert not found.value.may_still_arrive
    shared.close()


def test_what_a_report_raises_comes_once_the_agent_has_ended() -> None:
    own, theirs = np.zeros(1 << 20, np.uint8), np.ones(1 << 20, np.uint8)

    def report(_: int) -> None:
        raise OSError("nobody listens")

    shared = SharedRanges("source", [_range(theirs)])
    reader = RangesReader("bytes", most_bytes=1 << 20, stall_s=20.0)
    with pytest.raises(OSError, match="nobody listens"):
        reader.read(shared.target, [(_range(own), _range(theirs))], report)
    assert reader._reference is not None
    assert reader._reference() is None
    shared.close()


def _range(content: np.ndarray) -> MemoryRange:
    return MemoryRange(content.ctypes.data, content.nbytes, "DRAM", 0)
