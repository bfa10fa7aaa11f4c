"""What KV in FP8 is refused with at start, and what it does not concern."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from weft.engine.base.config import EngineConfig
from weft.engine.base.errors import ConfigError
from weft.engine.executor.kv_format import kept_layout
from weft.engine.memory.layout import CacheLayout, PagedPlane, in_8_bits, plane_beside, window_plane
from weft.engine.model.loader import LoadedModel

PLANE = PagedPlane(layers=2, heads=2, dim=32, dtype="bfloat16")
BESIDE = PagedPlane(name=plane_beside("target", 1, 48), layers=3, heads=1, dim=48, dtype="bfloat16")
WINDOWS = PagedPlane(name=window_plane(64), layers=2, heads=2, dim=32, dtype="bfloat16")
LAYOUT = CacheLayout.of_planes([PLANE, BESIDE, WINDOWS], 16)


def test_every_plane_keeps_a_scale_for_each_vector() -> None:
    layout = in_8_bits(LAYOUT, "fp8_e4m3")
    sizes = [group.page_bytes(16) for group in layout.groups]
    assert sizes == [16 * 2 * (2 * 2 * 36 + 3 * 52), 16 * 2 * 2 * 2 * 36]
    assert layout.describe() != LAYOUT.describe()
    assert layout.describe().count("fp8_e4m3") == 6


@pytest.mark.parametrize(
    ("plane", "problem"),
    [
        (
            PagedPlane(layers=1, heads=1, dim=64, dtype="bfloat16", parts=("kv",)),
            "latent attention",
        ),
        (PagedPlane(layers=1, heads=1, dim=24, dtype="bfloat16"), "no multiple of 16"),
    ],
)
def test_what_has_no_kernel_is_refused(plane: PagedPlane, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_dtype: fp8_e4m3 is not supported with .*{problem}"):
        in_8_bits(CacheLayout.of_planes([plane], 16), "fp8_e4m3")


@pytest.mark.parametrize(
    ("capability", "is_encoder"), [((8, 6), False), ((8, 9), False), ((8, 6), True)]
)
def test_older_gpus_are_refused_and_encoders_keep_their_layout(
    capability: tuple[int, int], is_encoder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    model = SimpleNamespace(kv_layout=lambda page_size: LAYOUT)
    loaded = SimpleNamespace(model=model, config=SimpleNamespace(is_encoder=is_encoder))
    settings = EngineConfig(model_dir=Path("model"), device="cuda", kv_dtype="fp8_e4m3")
    given = settings, cast("LoadedModel", loaded), torch.device("cuda")
    if is_encoder:
        assert kept_layout(*given) == LAYOUT
    elif capability < (8, 9):
        with pytest.raises(ConfigError, match=r"kv_dtype: .* compute capability \(8, 9\)"):
            kept_layout(*given)
    else:
        assert kept_layout(*given) == in_8_bits(LAYOUT, "fp8_e4m3")
