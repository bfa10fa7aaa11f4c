"""Settings with which KV in 8 bits is refused at start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.kv_formats import check_kv_dtype
from weft.contract.errors import ConfigError
from weft.contract.layout import CacheLayout, PagedPlane, in_8_bits, plane_beside, window_plane
from weft.engine.base.config import EngineConfig
from weft.engine.executor.kv_format import kept_layout
from weft.engine.model.loader import LoadedModel
from weft.testing.models.families import SIZES

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
    ("architecture", "fields", "problem"),
    [
        ("LlamaForCausalLM", {"head_dim": 24}, "no multiple of 16"),
        ("LlamaForCausalLM", {"head_dim": 32}, ""),
    ],
)
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_what_has_no_kernel_is_refused(
    kv_dtype: str, architecture: str, fields: dict[str, Any], problem: str
) -> None:
    raw = {**SIZES, "architectures": [architecture], "hidden_act": "silu", **fields}
    model = ModelConfig.from_dict(raw)
    check_kv_dtype("auto", model)
    if not problem:
        check_kv_dtype(kv_dtype, model)
        return
    with pytest.raises(ConfigError, match=f"kv_dtype = {kv_dtype}: .*{problem}") as why:
        check_kv_dtype(kv_dtype, model)
    assert why.value.param == "kv_dtype"


def loaded_model() -> LoadedModel:
    model = SimpleNamespace(kv_layout=lambda page_size: LAYOUT)
    return cast("LoadedModel", SimpleNamespace(model=model))


@pytest.mark.parametrize("capability", [(8, 6), (8, 9)])
def test_older_gpus_are_refused(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = EngineConfig(model_dir=Path("model"), device="cuda", kv_dtype="fp8_e4m3")
    given = settings, loaded_model(), torch.device("cuda")
    if capability < (8, 9):
        with pytest.raises(ConfigError, match=r"kv_dtype: .* compute capability \(8, 9\)"):
            kept_layout(*given)
    else:
        assert kept_layout(*given) == in_8_bits(LAYOUT, "fp8_e4m3")
