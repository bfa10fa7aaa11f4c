"""Settings of an engine: what follows from them, and what is refused before it loads."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter, ValidationError
from weft.contract.errors import ConfigError
from weft.contract.settings import Setting
from weft.decode.main import DecodeSettings
from weft.engine.base.config import NEVER_SHIP_TOKENS, SETTINGS, EngineConfig

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


BOUNDED = sorted(name for name, setting in SETTINGS.items() if setting.bounds)


def beyond(bound: Setting) -> list[float]:
    """Numbers next to a bound, on the wrong side."""
    found = [math.nan]
    found += [] if bound.ge is None else [bound.ge - 1]
    found += [] if bound.gt is None else [bound.gt]
    return found + ([] if bound.le is None else [math.nextafter(bound.le, math.inf)])


@pytest.mark.parametrize("name", BOUNDED)
def test_each_number_has_its_bounds(name: str) -> None:
    """Also in the settings of the service that has it."""
    setting = DecodeSettings.model_fields.get(name)
    check = TypeAdapter(Annotated[float, *setting.metadata]) if setting else None
    for value in beyond(SETTINGS[name]):
        with pytest.raises(ConfigError, match=f"^{name} = {value}: must be [<>]=? [^;]*$"):
            EngineConfig(**ALONE | {name: value})
        if check is not None:
            with pytest.raises(ValidationError):
                check.validate_python(value)


def test_all_that_is_wrong_is_told_at_once() -> None:
    names = random.sample(BOUNDED, 5)
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**ALONE | dict.fromkeys(names, -1))
    told = [problem.split(" = ")[0] for problem in caught.value.message.split("; ")]
    assert sorted(told) == sorted(names)
    with pytest.raises(ConfigError, match=r"prefill_chunk_tokens.*; lease_s.*; draft_width"):
        EngineConfig(**ALONE, prefill_chunk_tokens=17, lease_s=1, renew_interval_s=1, draft_width=2)


def test_what_has_no_bound_is_no_number() -> None:
    """A number that is added gets its bounds, or a reason to have none."""
    numbers = {
        field.name
        for field in fields(EngineConfig)
        if {"int", "float"} & set(str(field.type).replace("|", " ").split())
    }
    assert numbers == set(BOUNDED)
