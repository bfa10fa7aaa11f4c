"""Matrices read from quantised checkpoints against the numbers that the files were made of."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.engine.model.stage import ModelShare
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.testing.models import int_models
from weft.testing.models.fp8_models import fp8_copy
from weft.testing.models.int_models import LAYOUTS, SIZES, Layout, gptq, packed_models
from weft.testing.models.quantised_models import copy_of_model, dequantised_copy, quantised_copy
from weft.testing.models.tiny_models import make_tiny, tiny_config

LAYER = "model.layers.1"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
PLAIN = tuple(f"{LAYER}.{name}" for name in ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj"))
"""Modules that tests leave in floats."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files") / "model"
    return make_tiny("llama", folder, random.randrange(10**6), **SIZES)


def read(path: Path, names: tuple[str, ...] = PARTS, layer: str = LAYER) -> list[torch.Tensor]:
    """Projections of a layer as products take them, in float32, by the checkpoint's scheme."""
    found, scheme = [], scheme_of(ModelConfig.load(path).quantization)
    shapes = {name: tensor.shape for name, tensor in load_file(floats_of(path)).items()}
    with Checkpoint(path) as checkpoint:
        weights = Weights(checkpoint, scheme, torch.float32, torch.device("cpu"))
        for name in names:
            rows, columns = shapes[f"{layer}.{name}.weight"]
            spec = LinearSpec(names=(name,), in_features=columns, rows=(rows,))
            found.append(weights.at(layer).matrix(spec))
    return found


def floats_of(path: Path) -> Path:
    beside = path.with_name(path.name.removesuffix("-packed") + "-floats")
    return beside / "model.safetensors"


def check(path: Path, names: tuple[str, ...] = PARTS, layer: str = LAYER) -> None:
    tensors = load_file(floats_of(path))
    for name, matrix in zip(names, read(path, names, layer), strict=True):
        torch.testing.assert_close(matrix, tensors[f"{layer}.{name}.weight"], msg=name)


def rewrite(path: Path, **changes: Any) -> None:
    """Changes fields of a config.json; None removes one."""
    config = json.loads((path / "config.json").read_text()) | changes
    kept = {name: value for name, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(kept))


@pytest.mark.parametrize("named", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("kept", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
def test_symmetric_zero_points_tell_how_they_are_kept(
    named: str, kept: int, bits: int, model_dir: Path, tmp_path: Path
) -> None:
    config = LAYOUTS["gptq"].config | {"sym": True, "checkpoint_format": named, "bits": bits}
    layout = Layout(config=config, write=gptq(kept), bits=bits, is_symmetric=True)
    check(packed_models(model_dir, tmp_path / "model", layout)[0])


def test_a_zero_point_of_zero_is_the_largest_number_in_the_first_version(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = int_models.draw_projection

    def drawn(weight: torch.Tensor, layout: Layout) -> int_models.Drawn:
        whole = draw(weight, layout)
        return replace(whole, zeros=torch.randint_like(whole.zeros, 0, 16))

    monkeypatch.setattr(int_models, "draw_projection", drawn)
    config = LAYOUTS["gptq"].config | {"sym": False}
    check(packed_models(model_dir, tmp_path / "model", replace(LAYOUTS["gptq"], config=config))[0])


@pytest.mark.parametrize("name", ["gptq act order", "compressed-tensors act order"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_columns_in_act_order_keep_their_bits(
    name: str, dtype: str, model_dir: Path, tmp_path: Path
) -> None:
    path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS[name])
    check(path)
    loaded = load_model(path, dtype)
    assert (loaded.weight_format, loaded.bytes_per_weight < 0.75) == ("int4", True)
    file = "gptq int4" if name.startswith("gptq") else "compressed-tensors int4"
    assert loaded.described_format.endswith(f" bytes a weight; file: {file}")


def test_orders_that_projections_do_not_share_are_told(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = replace(LAYOUTS["gptq act order"], shares_order=False)
    path, _ = packed_models(model_dir, tmp_path / "model", layout)
    check(path)
    loaded = load_model(path, "bfloat16")
    assert loaded.weight_format == "bfloat16 + int4"
    assert 1.2 < loaded.bytes_per_weight < 2
    assert f"{LAYER}.self_attn.v_proj: computed in bfloat16: groups of columns" in caplog.text
    assert "o_proj" not in caplog.text


def test_a_rank_of_columns_in_act_order_has_its_share(
    model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS["gptq act order"])
    scheme, whole = scheme_of(ModelConfig.load(path).quantization), load_file(floats_of(path))
    for name, split in (("self_attn.q_proj", "out"), ("self_attn.o_proj", "in")):
        expected = whole[f"{LAYER}.{name}.weight"].chunk(2, dim=0 if split == "out" else 1)
        rows, columns = whole[f"{LAYER}.{name}.weight"].shape
        for rank in range(2):
            with Checkpoint(path) as file:
                cpu, peers = torch.device("cpu"), SimpleNamespace(rank=rank, size=2)
                share = ModelShare(peers=peers)
                weights = Weights(file, scheme, torch.float32, cpu, share=share).at(LAYER)
                spec = LinearSpec(names=(name,), in_features=columns, rows=(rows,), split=split)
                torch.testing.assert_close(weights.matrix(spec), expected[rank])
    assert "o_proj: computed in float32" in caplog.text
    assert "q_proj" not in caplog.text


def plain_beside(kind: str, model_dir: Path, path: Path) -> Path:
    """A quantised model of which no list names the modules that are in floats."""
    if kind == "int8":
        dequantised_copy(model_dir, path.with_name("model-floats"), at_load=False)
        made = quantised_copy(model_dir, path, None, PLAIN)
    elif kind in int_models.LAYOUTS:
        return packed_models(model_dir, path, LAYOUTS[kind], PLAIN)[0]
    else:
        made, _ = fp8_copy(model_dir, path, kind)
    tensors, source = load_file(made / "model.safetensors"), load_file(floats_of(made))
    for name in PLAIN:
        for part in [part for part in tensors if part.startswith(f"{name}.")]:
            del tensors[part]
        tensors[f"{name}.weight"] = source[f"{name}.weight"]
    whole = path.with_name("plain") / "model"
    whole.parent.mkdir()
    beside = copy_of_model(made, whole, tensors, {})
    floats_of(whole).parent.mkdir()
    floats_of(whole).write_bytes(floats_of(made).read_bytes())
    return beside


@pytest.mark.parametrize(
    "kind", ["gptq", "awq", "compressed-tensors", "int8", "blocks", "modelopt", "channel"]
)
def test_plain_weights_are_floats_though_no_list_names_them(
    kind: str, model_dir: Path, tmp_path: Path
) -> None:
    check(plain_beside(kind, model_dir, tmp_path / "model"))


@pytest.mark.parametrize(
    ("ignore", "targets"),
    [
        ([f"{name}.linear" for name in PLAIN], ["Linear"]),
        ([], [rf"re:(?!{LAYER}).*"]),
        ([], [f"{LAYER}.{name}" for name in PARTS if f"{LAYER}.{name}" not in PLAIN]),
        (["lm_head"], ["re:.*self_attn.*", "re:.*mlp.*"]),
    ],
)
def test_lists_of_compressed_tensors(
    ignore: list[str], targets: list[str], model_dir: Path, tmp_path: Path
) -> None:
    own = LAYOUTS["compressed-tensors"]
    config = copy.deepcopy(own.config) | {"ignore": ignore}
    config["config_groups"]["group_0"]["targets"] = targets
    config["config_groups"]["group_1"] = config["config_groups"]["group_0"] | {"targets": ["x.y"]}
    path, _ = packed_models(model_dir, tmp_path / "model", replace(own, config=config), PLAIN)
    check(path)
    found = ModelConfig.load(path).quantization
    assert found is not None
    if ignore != ["lm_head"]:
        assert all(found.ignores(name) for name in PLAIN)
    assert found.ignores(f"{LAYER}.mlp.down_proj") == (targets[0] == rf"re:(?!{LAYER}).*")


@pytest.mark.parametrize(
    "field",
    [{"quantization_status": "frozen"}, {"sparsity_config": {"format": "dense", "targets": ["a"]}}],
)
def test_words_of_older_files_that_change_nothing(
    field: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    own = LAYOUTS["compressed-tensors"]
    layout = replace(own, config=own.config | field)
    check(packed_models(model_dir, tmp_path / "model", layout)[0])


@pytest.mark.parametrize("left_out", [["gate"], ["mlp.gate"], ["gate", "lm_head"], None])
def test_awq_beside_routers_in_floats(left_out: list[str] | None, tmp_path: Path) -> None:
    source = make_tiny("qwen3_moe", tmp_path / "tiny", random.randrange(10**6), **SIZES)
    layout = LAYOUTS["auto-round awq"]
    config = LAYOUTS["awq"].config | {"group_size": 32, "modules_to_not_convert": left_out}
    path, _ = packed_models(source, tmp_path / "model", replace(layout, config=config))
    names = tuple(f"experts.3.{name}_proj" for name in ("gate", "up", "down"))
    check(path, (*names, "gate"), f"{LAYER}.mlp")


def test_names_that_are_left_out_end_at_dots() -> None:
    own = LAYOUTS["awq"].config | {"modules_to_not_convert": ["gate", "layers.1.mlp"]}
    fields = {**tiny_config("llama"), "quantization_config": own}
    config = ModelConfig.from_dict(fields).quantization
    assert config is not None
    floats = ("model.layers.0.mlp.gate", "model.layers.1.mlp.up_proj", "gate")
    assert all(config.ignores(name) for name in floats)
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.11.mlp.up_proj", "navigate"):
        assert not config.ignores(name)


def modelopt(config: dict[str, Any]) -> dict[str, Any]:
    own = {name: value for name, value in config.items() if name != "quant_method"}
    return {"producer": {"name": "modelopt"}, "quantization": own}


@pytest.mark.parametrize(
    "kind", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"]
)
def test_files_beside_config_json(kind: str, model_dir: Path, tmp_path: Path) -> None:
    if kind == "hf_quant_config.json":
        path, _ = fp8_copy(model_dir, tmp_path / "model", "modelopt")
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        content, bad = modelopt(config), modelopt(config | {"quant_algo": "NVFP4_AWQ"})
    elif kind == "quant_config.json":
        path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS["awq"])
        content = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
        bad = content | {"w_bit": 3}
    else:
        path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS["gptq symmetric"])
        content = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1}
        bad = content | {"bits": 2}
    rewrite(path, quantization_config=None)
    (path / kind).write_text(json.dumps(content))
    check(path)
    (path / kind).write_text(json.dumps(bad))
    with pytest.raises(ModelError, match=rf"quantization_config: .*read from {kind}"):
        ModelConfig.load(path)
    (path / kind).write_text("[]")
    with pytest.raises(ModelError, match=kind):
        ModelConfig.load(path)


@pytest.mark.parametrize("where", ["compression_config", "text_config"])
def test_other_places_in_config_json(where: str, model_dir: Path, tmp_path: Path) -> None:
    path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS["compressed-tensors"])
    config = LAYOUTS["compressed-tensors"].config
    own = {"quantization_config": config} if where == "text_config" else config
    rewrite(path, **{"quantization_config": None, where: own})
    check(path)
