"""Models with FP8 products against transformers on the same weights in floats."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint.quantization import resolve_quantization
from weft.contract.errors import ConfigError, ModelError
from weft.engine.model.loader import load_model
from weft.engine.model.weights.checkpoint import Checkpoint
from weft.engine.model.weights.schemes.registry import scheme_of
from weft.engine.model.weights.specs import LinearSpec
from weft.engine.model.weights.weights import Weights
from weft.testing.models.choices import (
    NEAR_TIE,
    OF_STATES,
    check_choices,
    where_experts_are_sure,
)
from weft.testing.models.families import make_family
from weft.testing.models.fp8_models import LAYOUTS, compressed, fp8_copy, is_rounded
from weft.testing.models.paging import PagedDriver
from weft.testing.models.reference_models import make_reference
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny, save_weights


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("fp8") / "model", random.randrange(10**6))


def check_greedy(model: Any, floats: Path, vocab: int = 500, near_tie: float = NEAR_TIE) -> None:
    """Greedy tokens are those that transformers draws with the same weights in floats."""
    from transformers import AutoModelForCausalLM

    prompt = [random.randrange(3, vocab) for _ in range(33)]
    (tokens,) = PagedDriver(model, num_pages=64).greedy([prompt], 24)
    reference = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    with where_experts_are_sure(lambda: reference, prompt + tokens):
        check_choices(logits[len(prompt) - 1 :], tokens, near_tie)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_of_a_checkpoint(layout: str, model_dir: Path, tmp_path: Path) -> None:
    path, floats = fp8_copy(model_dir, tmp_path / "fp8", layout)
    loaded = load_model(path, "float32")
    # CPUs do not multiply FP8.
    assert loaded.weight_format == "float32"
    assert "; file: fp8 " in loaded.described_format
    check_greedy(loaded.model, floats)


@pytest.mark.parametrize("layout", ["blocks", "channel"])
def test_experts_of_a_checkpoint(layout: str, tmp_path: Path) -> None:
    source = make_tiny("qwen3_moe", tmp_path / "model", random.randrange(10**6))
    path, floats = fp8_copy(source, tmp_path / "fp8", layout)
    check_greedy(load_model(path, "float32").model, floats)


GATED = {
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40,
         "head_dim": None, "shared_expert_intermediate_size": 56},
    ),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 7, "moe_topk": 3, "intermediate_size": 40}),
    "gpt-oss": (
        "gpt_oss", {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40}
    ),
    "granite-moe": (
        "granitemoe",
        {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40,
         "head_dim": None},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "qwen2-moe" else pytest.mark.full) for name in GATED],
)
def test_gates_without_scales_are_floats_though_no_list_names_them(
    name: str, tmp_path: Path, seed: int
) -> None:
    kind, fields = GATED[name]
    make_reference(kind, tmp_path / "model", seed, vocab_size=500, **fields)
    config = {k: v for k, v in LAYOUTS["blocks"].items() if k != "modules_to_not_convert"}
    path, floats = fp8_copy(tmp_path / "model", tmp_path / "fp8", "blocks", config)
    tensors = load_file(path / "model.safetensors")
    gates = [key for key in tensors if "gate" in key.split(".")[-2] or "router" in key]
    assert any(tensors[key].dtype == torch.float32 for key in gates)
    check_greedy(load_model(path, "float32").model, floats)


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("qwen3_5", marks=pytest.mark.full)])
def test_recurrent_layers_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    source = make_family(name, tmp_path / "model", seed, linear_key_head_dim=64)
    kept = ["lm_head", "in_proj_ba", "in_proj_b", "in_proj_a", "shared_expert_gate", "mlp.gate"]
    config = LAYOUTS["blocks"] | {"modules_to_not_convert": kept}
    path, floats = fp8_copy(source, tmp_path / "fp8", "blocks", config)
    check_greedy(load_model(path, "float32").model, floats, 259, OF_STATES)


def test_weights_made_at_load(model_dir: Path, tmp_path: Path) -> None:
    _, floats = fp8_copy(model_dir, tmp_path / "fp8", "channel")
    scheme = scheme_of(resolve_quantization("fp8", None, "cuda"))
    for name, expected in load_file(floats / "model.safetensors").items():
        if is_rounded(name):
            (rows, columns), module = expected.shape, name.removesuffix(".weight")
            spec = LinearSpec(names=(module,), in_features=columns, rows=(rows,))
            with Checkpoint(model_dir) as file:
                made = Weights(file, scheme, torch.float32, torch.device("cpu")).matrix(spec)
            # Of two ways to divide by a scale one may round a weight to its other neighbour.
            torch.testing.assert_close(made, expected, rtol=1 / 8, atol=1e-6)
            assert (made != expected).float().mean() < 1e-3


def test_a_cpu_makes_no_fp8(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization: CPUs do not multiply fp8.*int8 or int4"):
        load_model(model_dir, quantization="fp8")


def test_ignored_modules_stay_in_floats(model_dir: Path, tmp_path: Path) -> None:
    config = LAYOUTS["blocks"] | {"modules_to_not_convert": ["layers.1.mlp", "o_proj"]}
    path, floats = fp8_copy(model_dir, tmp_path / "fp8", "blocks", config)
    kept, tensors = (load_file(one / "model.safetensors") for one in (model_dir, path))
    expected = load_file(floats / "model.safetensors")
    for name in kept:
        if "o_proj" in name or "layers.1.mlp" in name:
            tensors[name] = expected[name] = kept[name]
            del tensors[f"{name}_scale_inv"]
    save_weights(path, tensors)
    save_weights(floats, expected)
    check_greedy(load_model(path, "float32").model, floats)


def test_every_tensor_is_used_and_every_parameter_filled(model_dir: Path, tmp_path: Path) -> None:
    path, _ = fp8_copy(model_dir, tmp_path / "fp8", "tensor")
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.input_scale"
    save_weights(path, {n: t for n, t in tensors.items() if n != name})
    with pytest.raises(ModelError, match=rf"lacks tensors: {name}"):
        load_model(path, "float32")
    save_weights(path, tensors | {"model.layers.0.self_attn.k_scale": torch.ones(1)})
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.self_attn\.k_scale"):
        load_model(path, "float32")
    for bad in (-1.0, float("inf"), float("nan")):
        save_weights(path, tensors | {name: torch.full((1,), bad)})
        with pytest.raises(ModelError, match=r"up_proj\.input_scale.* (is no scale|is not finite)"):
            load_model(path, "float32")
    weight = "model.layers.0.mlp.up_proj.weight"
    save_weights(path, tensors | {weight: tensors[weight].float()})
    with pytest.raises(ModelError, match=r"up_proj\.weight is F32; only F8_E4M3"):
        load_model(path, "float32")
    poisoned = tensors[weight].clone()
    poisoned.view(torch.uint8)[3, 5] = 0xFF
    save_weights(path, tensors | {weight: poisoned})
    with pytest.raises(ModelError, match=r"up_proj\.weight has a number that is not finite"):
        load_model(path, "float32")


@pytest.mark.parametrize("layout", ["tensor", "modelopt"])
def test_fixed_scales_of_kv_are_checked_and_left_out(
    layout: str, model_dir: Path, tmp_path: Path
) -> None:
    config = LAYOUTS[layout] | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    path, floats = fp8_copy(model_dir, tmp_path / "fp8", layout, config)
    tensors = load_file(path / "model.safetensors")
    layers = {name.rpartition("k_proj.weight")[0] for name in tensors if "k_proj.weight" in name}
    for layer in layers - {""}:
        for part in "kv":
            module = f"{part}_proj." if layout == "modelopt" else ""
            tensors[f"{layer}{module}{part}_scale"] = torch.rand(1) + 0.1
    save_weights(path, tensors)
    check_greedy(load_model(path, "float32").model, floats)
    save_weights(path, tensors | {f"{layer}{module}{part}_scale": torch.tensor([-1.0])})
    with pytest.raises(ModelError, match=r"v_scale: -1.0 is no scale"):
        load_model(path, "float32")


def test_numbers_are_not_read_without_their_scales(model_dir: Path, tmp_path: Path) -> None:
    path, _ = fp8_copy(model_dir, tmp_path / "fp8", "channel")
    fields = json.loads((path / "config.json").read_text())
    del fields["quantization_config"]
    (path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match="is F8_E4M3; only F32"):
        load_model(path, "float32")


def changed(layout: str, **fields: Any) -> dict[str, Any]:
    return copy.deepcopy(LAYOUTS[layout]) | fields


def weights_of(**fields: Any) -> dict[str, Any]:
    config = compressed("channel")
    config["config_groups"]["group_0"]["weights"].update(fields)
    return config


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (changed("blocks", weight_block_size=[64, 128]), r"weight_block_size \[64, 128\]"),
        (changed("blocks", activation_scheme="static"), "with static activations"),
        (changed("blocks", activation_scheme="none"), "activation_scheme 'none'"),
        (changed("blocks", fmt="e5m2"), "fmt 'e5m2'"),
        (changed("blocks", modules_to_not_convert="lm_head"), "expected a list of names"),
        (changed("modelopt", quant_algo="NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ'"),
        (changed("modelopt", kv_cache_quant_algo="NVFP4"), "kv_cache_quant_algo 'NVFP4'"),
        (changed("channel", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (changed("channel", ignore=["re:("]), r"ignore: 're:\('"),
        (weights_of(num_bits=4), r"weights of \(4, 'float', True\)"),
        (weights_of(strategy="group"), "weights.strategy 'group'"),
        (weights_of(strategy="block", block_structure=[1, 32]), r"block_structure \[1, 32\]"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], problem: str, model_dir: Path, tmp_path: Path
) -> None:
    path, _ = fp8_copy(model_dir, tmp_path / "fp8", "channel", config)
    with pytest.raises(ModelError, match=rf"quantization_config: .*{problem}"):
        load_model(path, "float32")


def test_settings_that_do_not_fit_are_refused(model_dir: Path, tmp_path: Path) -> None:
    path, _ = fp8_copy(model_dir, tmp_path / "fp8", "blocks")
    with pytest.raises(ConfigError, match="the checkpoint is fp8 already"):
        load_model(path, "float32", quantization="int8")


def test_pages_of_models_with_other_weights_are_never_the_same(
    model_dir: Path, tmp_path: Path
) -> None:
    made = [
        load_model(model_dir, "float32", quantization=name) for name in ("auto", "int4", "int8")
    ]
    found = [
        load_model(fp8_copy(model_dir, tmp_path / layout, layout)[0], "float32")
        for layout in ("blocks", "block")
    ]
    assert len({one.digest for one in (*made, *found)}) == 5
