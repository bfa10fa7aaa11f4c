"""Settings of an engine: what follows from them, and what is refused before it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from weft.engine.config import NEVER_SHIP_TOKENS, EngineConfig
from weft.engine.errors import ConfigError

ALONE: dict[str, Any] = {
    "model_dir": Path("model"),
    "transport": "data",
    "local_prefill_max_tokens": NEVER_SHIP_TOKENS,
}


def test_an_engine_alone_ships_nothing() -> None:
    for device in ("cpu", "cuda", "cuda:1"):
        assert not EngineConfig(**ALONE, device=device).ships_pages


@pytest.mark.parametrize(
    "other",
    [
        {"role": "prefill"},
        {"has_store": True},
        {"transport": "auto"},
        {"local_prefill_max_tokens": 0},
        {"local_prefill_max_tokens": None},
    ],
)
def test_others_ship_pages(other: dict[str, Any]) -> None:
    assert EngineConfig(**{**ALONE, **other}, device="cuda").ships_pages


def test_a_staging_area_has_a_size() -> None:
    with pytest.raises(ConfigError, match="staging_bytes"):
        EngineConfig(**ALONE, staging_bytes=0)


@pytest.mark.parametrize(
    ("overlap", "device", "is_overlapped"),
    [
        ("auto", "cpu", False),
        ("auto", "cuda:1", True),
        ("on", "cpu", True),
        ("off", "cuda", False),
    ],
)
def test_steps_overlap_on_a_gpu_or_where_it_is_asked_for(
    overlap: Any, device: str, is_overlapped: bool
) -> None:
    assert EngineConfig(**ALONE, device=device, overlap=overlap).is_overlapped == is_overlapped


def test_steps_on_a_gpu_have_room_for_decodes_beside_their_prompts() -> None:
    assert EngineConfig(**ALONE).decodes_beside == 0
    assert EngineConfig(**ALONE, device="cuda:1").decodes_beside == 64
    assert EngineConfig(**ALONE, device="cuda", max_running_requests=5).decodes_beside == 5
