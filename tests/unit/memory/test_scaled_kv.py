"""Settings with which KV in 8 bits is refused at start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, PagedPlane, in_8_bits, plane_beside, window_plane
from weft.engine.base.config import EngineConfig
from weft.engine.executor.kv_format import kept_layout
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


def loaded_model(*, is_encoder: bool) -> LoadedModel:
    model = SimpleNamespace(kv_layout=lambda page_size: LAYOUT)
    config = SimpleNamespace(is_encoder=is_encoder, architecture="BertModel")
    return cast("LoadedModel", SimpleNamespace(model=model, config=config))


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_encoders_refuse_a_format_of_kv(kv_dtype: Literal["fp8_e4m3", "int8"]) -> None:
    settings = EngineConfig(model_dir=Path("model"), device="cpu", kv_dtype=kv_dtype)
    loaded, device = loaded_model(is_encoder=True), torch.device("cpu")
    with pytest.raises(ConfigError, match=f"kv_dtype = {kv_dtype}: BertModel is an encoder") as why:
        kept_layout(settings, loaded, device)
    assert why.value.param == "kv_dtype"
    assert kept_layout(replace(settings, kv_dtype="auto"), loaded, device) == LAYOUT


@pytest.mark.parametrize("capability", [(8, 6), (8, 9)])
def test_older_gpus_are_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = EngineConfig(model_dir=Path("model"), device="cuda", kv_dtype="fp8_e4m3")
    given = settings, loaded_model(is_encoder=False), torch.device("cuda")
    if capability < (8, 9):
        with pytest.raises(ConfigError, match=r"kv_dtype: .* compute capability \(8, 9\)"):
            kept_layout(*given)
    else:
        assert kept_layout(*given) == in_8_bits(LAYOUT, "fp8_e4m3")
