"""Weights that one process copies from another's GPU memory: by the driver's handles, over NIXL."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from weft.contract.request import StopCriteria
from weft.contract.weights import WeightOffer
from weft.engine.loop.llm import LLM
from weft.pages.transfer import device_ranges
from weft.pages.transfer.device_memory import Copy, DeviceCopy, DeviceStream
from weft.testing.engine.weight_source import WeightSource
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.needs("cuda")

PROMPTS = [list(range(3, 43)), list(range(5, 20))]
STOP = StopCriteria(max_tokens=40, ignore_eos=True)
SETTINGS: dict[str, Any] = {"num_pages": 256, "device": "cuda:0", "prefix_cache": False}


def test_weights_come_by_handles_or_over_nixl_and_never_half(
    tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source has been updated since it began, so that what comes cannot be the files'."""
    caplog.set_level(logging.INFO)
    first, second = (make_tiny("llama", tmp_path / str(one), seed + one) for one in range(2))

    def texts(llm: LLM) -> list[list[int]]:
        return [one.token_ids for one in llm.generate(PROMPTS, stop=STOP)]

    def started(offer: WeightOffer) -> tuple[list[list[int]], str]:
        """The texts of a worker that starts, and the way that its weights took."""
        caplog.clear()
        with LLM(first, weights_offer=offer.to_json(), **SETTINGS) as llm:
            lanes = [vars(one)["lanes"] for one in caplog.records if "lanes" in vars(one)]
            return texts(llm), lanes[0] if lanes else ""

    with LLM(first, **SETTINGS) as llm:
        old = texts(llm)
    with LLM(second, **SETTINGS) as llm:
        new = texts(llm)
    with WeightSource(first, **SETTINGS) as source:
        assert "ready" in source.call("refit", second)
        offer = source.offer()
        assert offer.ranks[0].allocations
        assert started(offer) == (new, "CUDA IPC")
        elsewhere = replace(offer, ranks=[replace(offer.ranks[0], host="another")])
        found, lanes = started(elsewhere)
        assert found == new
        assert lanes not in ("", "CUDA IPC")
        bad = [replace(one, handle=bytes(64)) for one in offer.ranks[0].allocations]
        found, lanes = started(replace(offer, ranks=[replace(offer.ranks[0], allocations=bad)]))
        assert found == new
        assert lanes not in ("", "CUDA IPC")
        # It is killed in the middle of a copy; the driver keeps what is open.
        monkeypatch.setattr(device_ranges, "_BATCH_BYTES", 1)
        copy, num_copies = DeviceStream.copy, 0

        def killing(self: DeviceStream, copies: Sequence[Copy]) -> DeviceCopy:
            nonlocal num_copies
            num_copies += 1
            if num_copies == 4:
                source.kill()
            return copy(self, copies)

        monkeypatch.setattr(DeviceStream, "copy", killing)
        found, lanes = started(offer)
        assert num_copies >= 4
        assert found == (new if lanes else old)
        monkeypatch.undo()
        # Its memory goes some time after it has ended, and what comes until then is right.
        found, lanes = started(offer)
        assert found == (new if lanes else old)
