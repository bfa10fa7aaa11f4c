"""What KV in FP8 is refused with at start, and what it does not concern."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from weft.engine.base.config import EngineConfig
from weft.engine.base.errors import ConfigError
from weft.engine.loop.build import _kv_layout
from weft.engine.memory.layout import CacheLayout, PagedPlane, in_fp8, window_plane
from weft.engine.model.loader import LoadedModel

PLANE = PagedPlane(layers=2, heads=2, dim=32, dtype="bfloat16")
WINDOWS = PagedPlane(name=window_plane(64), layers=2, heads=2, dim=32, dtype="bfloat16")
LAYOUT = CacheLayout.of_planes([PLANE], 16)


def settings(**more: Any) -> EngineConfig:
    return EngineConfig(model_dir=Path("model"), device="cuda", kv_dtype="fp8_e4m3", **more)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"enable_lora": True}, "LoRA adapters"),
        ({"drafter": "ngram"}, "drafter = ngram"),
        ({"deterministic": True}, "deterministic"),
        ({"tp": 2}, "tp > 1"),
    ],
)
def test_settings_beside_it_are_refused(more: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype = fp8_e4m3: must be auto with {problem}"):
        settings(**more)


def test_pages_of_windows_are_refused() -> None:
    assert in_fp8(LAYOUT).plane.dtype == "fp8_e4m3"
    with pytest.raises(ConfigError, match="not supported with pages of windows"):
        in_fp8(CacheLayout.of_planes([PLANE, WINDOWS], 16))


@pytest.mark.parametrize(
    ("capability", "is_encoder"), [((8, 6), False), ((8, 9), False), ((8, 6), True)]
)
def test_older_gpus_are_refused_and_encoders_keep_their_layout(
    capability: tuple[int, int], is_encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = SimpleNamespace(kv_layout=lambda page_size: LAYOUT)
    loaded = SimpleNamespace(model=model, config=SimpleNamespace(is_encoder=is_encoder))
    given = settings(), cast("LoadedModel", loaded), torch.device("cuda")
    if is_encoder:
        assert _kv_layout(*given) == LAYOUT
    elif capability < (8, 9):
        with pytest.raises(ConfigError, match=r"kv_dtype: .* compute capability \(8, 9\)"):
            _kv_layout(*given)
    else:
        assert _kv_layout(*given) == in_fp8(LAYOUT)
