"""Checkpoints whose modules have several formats, in the spellings that published ones use."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.testing.models.int_models import (
    LAYOUTS,
    SIZES,
    Layout,
    compressed_config,
    gptq,
    packed_models,
)
from weft.testing.models.paging import PagedDriver
from weft.testing.models.quantised_models import copy_of_model
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

DOWN = r"mlp\.down_proj$"
EIGHT = Layout(config={}, write=gptq(1), bits=8, group=32)
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed") / "model"
    return make_tiny("llama", folder, random.randrange(10**6), **SIZES)


def check(packed: Path, floats: Path, formats: str) -> None:
    """The tokens are those of the same numbers in floats, both by Weft."""
    loaded = load_model(packed, "float32")
    assert loaded.weight_format == formats
    prompt = [random.randrange(3, 500) for _ in range(33)]
    tokens = [
        PagedDriver(model, num_pages=64).greedy([prompt], 24)[0]
        for model in (loaded.model, load_model(floats, "float32").model)
    ]
    assert tokens[0] == tokens[1]


GPTQ = LAYOUTS["gptq"].config
SPELLINGS: dict[str, dict[str, Any]] = {
    "GPTQModel": GPTQ | {"dynamic": {r"+:.*\.down_proj": {"bits": 8}, r"-:.*lm_head": {}}},
    "GPTQModel without a sign": GPTQ | {"dynamic": {r".*\.mlp\.down_proj$": {"bits": 8}}},
    "auto-round, an expression": ROUND | {"extra_config": {r".*down_proj": {"bits": 8}}},
    "auto-round, names": ROUND
    | {
        "extra_config": {
            **{f"model.layers.{n}.mlp.down_proj": {"bits": 8, "sym": True} for n in range(4)},
            "model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"},
        }
    },
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_modules_with_bits_of_their_own(name: str, model_dir: Path, tmp_path: Path) -> None:
    is_symmetric = "round" in name
    four = replace(LAYOUTS["gptq"], config=SPELLINGS[name], is_symmetric=is_symmetric)
    eight = replace(EIGHT, is_symmetric=is_symmetric)
    check(*packed_models(model_dir, tmp_path / "m", four, (), {DOWN: eight}), "int4 + int8")


def test_modules_that_gptqmodel_leaves_out(model_dir: Path, tmp_path: Path) -> None:
    names = tuple(f"model.layers.{n}.mlp.down_proj" for n in range(4))
    config = GPTQ | {"dynamic": {r"-:.*\.down_proj": {}}}
    layout = replace(LAYOUTS["gptq"], config=config)
    packed, floats = packed_models(model_dir, tmp_path / "m", layout, names)
    check(packed, floats, "int4 + float32")


def mixed_groups(**targets: list[str]) -> dict[str, Any]:
    """Groups of 4 and 8 bits of compressed-tensors, by what they target."""
    four = compressed_config(strategy="group", group_size=32, symmetric=True)
    (group,) = four["config_groups"].values()
    groups = {
        f"group_{bits}": group
        | {"targets": found, "weights": group["weights"] | {"num_bits": int(bits)}}
        for bits, found in (("4", targets["four"]), ("8", targets["eight"]))
    }
    return four | {"config_groups": groups}


@pytest.mark.parametrize(
    ("four", "eight"),
    [
        (["Linear"], ["re:.*down_proj$"]),
        (["re:.*self_attn.*", "re:.*(gate|up)_proj$"], ["re:.*mlp.down_proj"]),
        (["Linear"], [f"model.layers.{n}.mlp.down_proj" for n in range(4)]),
    ],
)
@pytest.mark.parametrize("told", ["mixed-precision", "pack-quantized", "by group"])
def test_groups_of_several_formats(
    told: str, four: list[str], eight: list[str], model_dir: Path, tmp_path: Path
) -> None:
    config = mixed_groups(four=four, eight=eight)
    if told == "by group":
        config["format"] = "mixed-precision"
        for group in config["config_groups"].values():
            group["format"] = "pack-quantized"
    else:
        config["format"] = told
    of_four = replace(LAYOUTS["compressed-tensors"], config=config)
    of_eight = replace(of_four, bits=8)
    paths = packed_models(model_dir, tmp_path / "m", of_four, (), {DOWN: of_eight})
    check(*paths, "int4 + int8")


def test_attention_in_fp8_and_mlps_in_4_bits(model_dir: Path, tmp_path: Path) -> None:
    config = mixed_groups(four=["re:.*mlp.*_proj"], eight=["re:.*self_attn.*"])
    eight = config["config_groups"]["group_8"]
    eight["weights"] = {
        **{"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        "dynamic": False,
    }
    eight["input_activations"] = eight["weights"] | {"strategy": "token", "dynamic": True}
    config["format"] = "mixed-precision"
    layout = replace(LAYOUTS["compressed-tensors"], config=config)
    names = tuple(
        name.removesuffix(".weight")
        for name in load_file(model_dir / "model.safetensors")
        if "self_attn" in name and name.endswith("_proj.weight")
    )
    packed, floats = packed_models(model_dir, tmp_path / "m", layout, names)
    tensors, wide = (load_file(path / "model.safetensors") for path in (packed, floats))
    for name in names:
        weight = tensors.pop(f"{name}.weight")
        scale = weight.abs().amax(dim=1, keepdim=True) / 448
        rounded = (weight / scale).to(torch.float8_e4m3fn)
        tensors |= {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
        wide[f"{name}.weight"] = rounded.float() * scale
    own = {"quantization_config": config}
    packed = copy_of_model(model_dir, tmp_path / "fp8-packed", tensors, own)
    check(packed, copy_of_model(model_dir, tmp_path / "fp8-floats", wide, {}), "int4 + float32")


def test_projections_of_one_product_in_several_formats_become_floats(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = GPTQ | {"dynamic": {r"+:.*\.v_proj": {"bits": 8}}}
    four = replace(LAYOUTS["gptq"], config=config)
    paths = packed_models(model_dir, tmp_path / "m", four, (), {"v_proj": EIGHT})
    check(*paths, "int4 + float32")
    assert "v_proj: computed in float32: their formats differ" in caplog.text


@pytest.mark.parametrize(
    ("module", "is_float"),
    [
        ("lm_head", True),
        ("model.layers.3.mlp.gate", True),
        ("model.layers.11.self_attn.q_proj", True),
        ("model.visual.blocks.0.attn.qkv", True),
        ("model.layers.3.mlp.experts.7.up_proj", False),
        ("model.layers.1.mlp.shared_expert.up_proj", False),
    ],
)
@pytest.mark.parametrize("field", ["exclude_modules", "ignore"])
def test_modelopts_patterns(field: str, module: str, is_float: bool, tmp_path: Path) -> None:
    """As config.json has them beside `config_groups`, which say the same again."""
    names = ["lm_head", "model.layers.*.self_attn*", "model.visual*", "*.mlp.gate"]
    group = {"num_bits": 4, "type": "float", "group_size": 16}
    config = {
        **{"quant_method": "modelopt", "quant_algo": "NVFP4", field: names},
        "config_groups": {
            "group_0": {"weights": group, "input_activations": group, "targets": ["Linear"]}
        },
        "producer": {"name": "modelopt", "version": "0.39.0"},
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    }
    source = make_tiny("llama", tmp_path / "model")
    fields = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    found = ModelConfig.load(source).quantization
    assert found is not None
    assert found.ignores(module) == is_float


def test_a_pattern_that_is_no_expression_is_refused(model_dir: Path, tmp_path: Path) -> None:
    layout = replace(LAYOUTS["gptq"], config=GPTQ | {"dynamic": {"+:(": {"bits": 8}}})
    packed, _ = packed_models(model_dir, tmp_path / "m", layout)
    with pytest.raises(ModelError, match="dynamic"):
        load_model(packed)
