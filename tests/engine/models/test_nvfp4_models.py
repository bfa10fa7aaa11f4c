"""Models in NVFP4, in both layouts of checkpoints, against the same weights in floats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weft.contract.errors import ModelError
from weft.engine.model.loader import check_weights, load_model
from weft.testing.models.every_family import check_logits
from weft.testing.models.int_models import SIZES
from weft.testing.models.nvfp4_models import CONFIGS, Layout, nvfp4_models
from weft.testing.models.quantised_models import copy_of_model
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.mark.parametrize("layout", CONFIGS)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_logits_are_those_of_the_weights_that_the_files_mean(
    kind: str, layout: Layout, tmp_path: Path
) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **SIZES)
    kept = tuple(f"model.layers.1.self_attn.{name}_proj" for name in "qkv")
    packed, floats = nvfp4_models(source, layout, kept)
    check_weights(packed)
    loaded = load_model(packed, "float32")
    assert loaded.described_format.startswith("nvfp4")
    assert "file: nvfp4" in loaded.described_format
    check_logits(loaded.model, floats)


def test_what_is_damaged_is_named(tmp_path: Path) -> None:
    source = make_tiny("llama", tmp_path / "model", random.randrange(10**6), **SIZES)
    packed, _ = nvfp4_models(source, "compressed-tensors")
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


def test_loaded_weights_take_four_and_a_half_bits(tmp_path: Path) -> None:
    sizes = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128}
    source = make_tiny("llama", tmp_path / "model", random.randrange(10**6), **sizes)
    packed, _ = nvfp4_models(source, "modelopt")
    loaded = load_model(packed, "bfloat16")
    assert loaded.weight_format == "nvfp4"
    # Beside the factor of each row, in float32.
    assert 4.5 / 8 <= loaded.bytes_per_weight <= 4.5 / 8 + 4 / 512


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_products_of_a_mixed_recipe_may_be_in_fp8(kind: str, tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6), **SIZES)
    paths = nvfp4_models(source, "modelopt")
    packed, floats = (load_file(path / "model.safetensors") for path in paths)
    layers = {}
    for name in [name for name in floats if name.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        algorithm = random.choice(("NVFP4", "W4A16_NVFP4"))
        layers[module] = {"quant_algo": algorithm, "group_size": 16}
        if "self_attn" not in name:
            continue
        scale, layers[module] = torch.rand(()) / 100, {"quant_algo": "FP8"}
        numbers = (floats[name] / scale).clamp(-400, 400).to(torch.float8_e4m3fn)
        floats[name] = numbers.float() * scale
        packed |= {name: numbers, f"{module}.weight_scale": scale}
        del packed[f"{module}.weight_scale_2"]
    config = CONFIGS["modelopt"] | {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    mixed = copy_of_model(source, tmp_path / "mixed", packed, {"quantization_config": config})
    wide = copy_of_model(source, tmp_path / "wide", floats, {})
    loaded = load_model(mixed, "float32")
    check_logits(loaded.model, wide)
    assert loaded.weight_format == "nvfp4 + float32"
    first = next(iter(layers))
    layers[first] = {"quant_algo": "W4A8_AWQ"}
    copy_of_model(source, tmp_path / "other", packed, {"quantization_config": config})
    with pytest.raises(ModelError, match=f"quantized_layers.{first}: 'W4A8_AWQ'"):
        load_model(tmp_path / "other")
