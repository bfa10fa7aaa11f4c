"""Models with packed integers against transformers on the same weights in floats."""

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
from weft.contract.errors import ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.kernels.shared.formats.int_groups import quantise_groups
from weft.testing.models.choices import check_choices, check_same, where_experts_are_sure
from weft.testing.models.every_family import OF_REFERENCES, load_reference
from weft.testing.models.int_models import LAYOUTS, SIZES, compressed_config, packed_models
from weft.testing.models.paging import PagedDriver
from weft.testing.models.quantised_models import copy_of_model, round_rows
from weft.testing.models.reference_models import make_reference
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny, save_weights

IN_EVERY_RUN = ("gptq", "gptq act order", "awq", "auto-round awq", "compressed-tensors with zeros")

EXPERTS_OF_AWQ = ("mixtral", "qwen2-moe", "qwen3-moe", "glm4-moe", "minimax-m2", "hy3")
WIDE_EXPERTS: dict[str, Any] = {
    "vocab_size": 500,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_key_value_heads": 2,
}
"""Columns are whole groups of AWQ, and rows whole words."""
WIDE_LATENTS: dict[str, Any] = {
    **{"q_lora_rank": 64, "kv_lora_rank": 64, "num_key_value_heads": 4},
    **{"head_dim": None, "v_head_dim": 32},
}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def tiny(kind: str, path: Path) -> Path:
    return make_tiny(kind, path, random.randrange(10**6), **SIZES)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny("llama", tmp_path_factory.mktemp("int4") / "model")


def check_greedy(model: Any, floats: Path) -> None:
    """Greedy tokens are those that transformers draws with the same weights in floats."""
    from transformers import AutoModelForCausalLM

    prompt = [random.randrange(3, 500) for _ in range(33)]
    (tokens,) = PagedDriver(model, num_pages=64).greedy([prompt], 40)
    reference = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits[0]
    with where_experts_are_sure(lambda: reference, prompt + tokens):
        check_choices(logits[len(prompt) - 1 :], tokens)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in IN_EVERY_RUN else pytest.mark.full)
        for name in LAYOUTS
    ],
)
def test_layouts_of_checkpoints(name: str, model_dir: Path, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    packed, floats = packed_models(model_dir, tmp_path / "model", layout)
    loaded = load_model(packed, "float32")
    assert loaded.weight_format == ("int8" if layout.bits == 8 else "int4")
    # A scale and an offset of 16 or 32 bits for each group, and panels of 32 rows.
    assert layout.bits / 8 < loaded.bytes_per_weight <= layout.bits / 8 + 8 / (layout.group or 128)
    check_greedy(loaded.model, floats)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("qwen3_moe", "compressed-tensors"),
        pytest.param("qwen3_moe", "gptq", marks=pytest.mark.full),
        pytest.param("qwen2", "awq", marks=pytest.mark.full),
    ],
)
def test_architectures(kind: str, name: str, tmp_path: Path) -> None:
    packed, floats = packed_models(tiny(kind, tmp_path / "m"), tmp_path / "model", LAYOUTS[name])
    check_greedy(load_model(packed, "float32").model, floats)


@pytest.mark.parametrize(
    "name",
    ["deepseek-v3", *(pytest.param(n, marks=pytest.mark.full) for n in EXPERTS_OF_AWQ)],
)
def test_experts_of_awq(name: str, tmp_path: Path) -> None:
    """Every expert is packed on its own, routers are in floats, as AutoAWQ writes them."""
    sizes = {**SIZES, **WIDE_EXPERTS, **(WIDE_LATENTS if name == "deepseek-v3" else {})}
    kind, own = OF_REFERENCES[name]
    make_reference(kind, tmp_path / "m", random.randrange(10**6), **(own | sizes))
    awq = LAYOUTS["awq"]
    config = awq.config | {"group_size": 64, "modules_to_not_convert": ["gate", "lm_head"]}
    layout = replace(awq, group=64, config=config)
    packed, floats = packed_models(tmp_path / "m", tmp_path / "model", layout)
    loaded = load_model(packed, "float32")
    assert loaded.described_format.endswith("file: awq int4")
    check_greedy(loaded.model, floats)


def test_modules_in_floats(model_dir: Path, tmp_path: Path) -> None:
    names = [f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")]
    paths = packed_models(model_dir, tmp_path / "model", LAYOUTS["gptq"], tuple(names))
    check_greedy(load_model(paths[0], "float32").model, paths[1])
    (tmp_path / "b").mkdir()
    paths = packed_models(model_dir, tmp_path / "b" / "model", LAYOUTS["gptq"], tuple(names[:1]))
    with pytest.raises(ModelError, match=r"one product.*only gate_proj"):
        load_model(paths[0], "float32")


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.full)])
def test_weights_made_at_load(kind: str, tmp_path: Path) -> None:
    source = make_tiny(kind, tmp_path / "model", random.randrange(10**6))
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = quantise_groups(weight).dequantised(torch.float32)
        elif name == "lm_head.weight":
            data, scales = round_rows(weight)
            tensors[name] = data.float() * scales
    loaded = load_model(source, "float32", quantization="int4")
    assert loaded.weight_format == "int4"
    check_greedy(loaded.model, copy_of_model(source, tmp_path / "floats", tensors, {}))


def test_every_tensor_is_used_and_every_parameter_filled(model_dir: Path, tmp_path: Path) -> None:
    path, _ = packed_models(model_dir, tmp_path / "model", LAYOUTS["gptq"])
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj"
    save_weights(path, {n: t for n, t in tensors.items() if n != f"{name}.scales"})
    with pytest.raises(ModelError, match=rf"lacks tensors: {name}\.scales"):
        load_model(path, "float32")
    save_weights(path, tensors | {f"{name}.more": torch.ones(1)})
    with pytest.raises(ModelError, match=rf"does not use: {name}\.more"):
        load_model(path, "float32")
    for part, bad, problem in (
        ("scales", torch.full_like(tensors[f"{name}.scales"], float("inf")), "not finite"),
        ("g_idx", torch.full_like(tensors[f"{name}.g_idx"], 99), "no such group"),
        ("bias", torch.ones_like(tensors[f"{name}.bias"]), "is not zero"),
        ("qweight", tensors[f"{name}.qweight"].float(), "is F32"),
        ("qweight", tensors[f"{name}.qweight"][1:].contiguous(), "has shape"),
    ):
        save_weights(path, tensors | {f"{name}.{part}": bad})
        with pytest.raises(ModelError, match=rf"{name}.*{problem}"):
            load_model(path, "float32")


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (GPTQ | {"bits": 3}, "bits = 3"),
        (GPTQ | {"group_size": 0}, "group_size 0"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 3}}}, "dynamic"),
        (GPTQ | {"lm_head": True}, "lm_head"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "'gemv'"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": False}, "zero_point"),
        (GPTQ | {"quant_method": "auto-round", "packing_format": "itrex"}, "'itrex'"),
        (GPTQ | {"quant_method": "auto-round", "extra_config": {"x": {"bits": 3}}}, "config of x"),
        (compressed_config(num_bits=3, strategy="channel"), "weights of 3 bits"),
        (compressed_config(strategy="tensor"), "weights.strategy = 'tensor'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], problem: str, model_dir: Path, tmp_path: Path
) -> None:
    path = copy_of_model(model_dir, tmp_path / "m", load_file(model_dir / "model.safetensors"), {})
    fields = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    with pytest.raises(ModelError, match=rf"quantization_config: .*{problem}"):
        load_model(path, "float32")


def test_an_engine_serves_int4(model_dir: Path, tmp_path: Path) -> None:
    packed, floats = packed_models(model_dir, tmp_path / "model", LAYOUTS["awq"])
    prompts = [[random.randrange(3, 500) for _ in range(n)] for n in (1, 20, 70)]
    texts, greedy = [], SamplingParams(temperature=0.0)
    cases: list[tuple[Path, dict[str, Any]]] = [
        (floats, {}),
        (packed, {}),
        (packed, {"drafter": "ngram"}),
        (packed, {"deterministic": True}),
    ]
    for path, settings in cases:
        with LLM(path, dtype="float32", num_pages=64, **settings) as llm:
            samples = llm.generate(prompts, greedy, StopCriteria(max_tokens=24))
            texts.append([sample.token_ids for sample in samples])
    for found in texts[1:]:
        for prompt, one, other in zip(prompts, found, texts[0], strict=True):
            check_same(lambda: load_reference(floats), prompt, one, other)
