"""Models in NVFP4, in both layouts of checkpoints, against the same weights in floats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from weft.contract.errors import ModelError
from weft.engine.model.loader import check_weights, load_model
from weft.testing.models.choices import where_experts_are_sure
from weft.testing.models.every_family import load_reference
from weft.testing.models.int_models import SIZES
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.quantised_models import copy_of_model
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

Layout = Literal["modelopt", "compressed-tensors"]
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CONFIGS: dict[Layout, dict[str, Any]] = {
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "ignore": ["lm_head"],
    },
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                },
                "input_activations": {"num_bits": 4, "type": "float", "dynamic": "local"},
            }
        },
    },
}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def drawn(weight: torch.Tensor, layout: Layout) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Tensors below the name of a projection of about such numbers, and the floats they mean."""
    rows, columns = weight.shape
    codes = torch.randint(0, 16, (rows, columns))
    scales = (torch.rand(rows, columns // 16) * 60 + 4).to(torch.float8_e4m3fn)
    factor = weight.std() / 100 * (1 + torch.rand(()))
    signed = torch.tensor(E2M1 + tuple(-one for one in E2M1), dtype=torch.float64)[codes]
    floats = signed * scales.double().repeat_interleave(16, 1) * factor.double()
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    if layout == "modelopt":
        own = {"weight": packed, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    else:
        divisor = (1 / factor).view(1)
        own = {"weight_packed": packed, "weight_global_scale": divisor}
        own["input_global_scale"] = torch.tensor([300.0])
    return own | {"weight_scale": scales}, floats.float()


def both(source: Path, layout: Layout, floats: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A model in NVFP4, and the same in floats; projections named by `floats` are no others."""
    tensors = load_file(source / "model.safetensors")
    packed, wide = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight") and module not in floats:
            parts, wide[name] = drawn(weight, layout)
            del packed[name]
            packed |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
    own = {"quantization_config": CONFIGS[layout]}
    first = copy_of_model(source, source.with_name("packed"), packed, own)
    return first, copy_of_model(source, source.with_name("floats"), wide, {})


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_logits_are_those_of_the_weights_that_the_files_mean(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **SIZES)
    kept = tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    packed, floats = both(source, layout, kept)
    check_weights(packed)
    loaded = load_model(packed, "float32")
    assert "file: nvfp4" in loaded.described_format
    prompt = [random.randrange(3, 500) for _ in range(33)]
    found = PagedDriver(loaded.model, 16).step([(PagedRequest(), prompt)], range(33))
    reference = load_reference(floats)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt]), use_cache=False).logits[0]
    with where_experts_are_sure(lambda: reference, prompt):
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", random.randrange(10**6), **SIZES)
    packed, _ = both(source, "compressed-tensors")
    tensors = load_file(packed / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_global_scale"
    own = {"quantization_config": CONFIGS["compressed-tensors"]}
    bad = copy_of_model(source, tmp_path / "zero", tensors | {name: torch.zeros(1)}, own)
    with pytest.raises(ModelError, match="down_proj"):
        load_model(bad, "float32")
    del tensors[name]
    lacking = copy_of_model(source, tmp_path / "lacking", tensors, own)
    with pytest.raises(ModelError, match=f"lacks tensors: {name}"):
        load_model(lacking, "float32")
