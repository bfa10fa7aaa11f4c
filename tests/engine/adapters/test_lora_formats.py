"""Adapters are read as PEFT means them: what is merged into the base equals PEFT's merged model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weft.checkpoint.adapters.digest import adapter_digest
from weft.checkpoint.adapters.names import DENSE_KINDS
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import AdapterError
from weft.engine.model.adapters.formats import read_adapter
from weft.testing.models.merged_adapters import assert_equals_peft
from weft.testing.models.tiny_adapters import (
    PREFIX,
    WEIGHTS_FILE,
    adapter_tensors,
    make_adapter,
    write_adapter,
)
from weft.testing.models.tiny_models import make_tiny, tiny_config

pytestmark = pytest.mark.usefixtures("single_thread")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, seed: int) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: make_tiny(kind, folder / kind, seed) for kind in ("llama", "qwen2", "qwen3")}


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_all_linear_modules(models: dict[str, Path], tmp_path: Path, seed: int, kind: str) -> None:
    adapter = assert_equals_peft(models[kind], tmp_path, seed, r=6, lora_alpha=9)
    assert set(adapter.modules) == {(layer, k) for layer in range(3) for k in DENSE_KINDS}
    assert adapter.rank == 6


def test_patterns_of_ranks_and_alphas_with_rslora(
    models: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    adapter = assert_equals_peft(
        models["qwen2"],
        tmp_path,
        seed,
        r=4,
        lora_alpha=7,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "o_proj", "down_proj"],
        rank_pattern={"^model.layers.1.self_attn.q_proj": 12, r"layers\.\d+\.mlp\.down_proj": 16},
        alpha_pattern={"v_proj": 20, "layers.2.self_attn.q_proj": 3},
    )
    ranks = {key: pair.rank for key, pair in adapter.modules.items()}
    assert ranks[1, "q"] == 12
    assert ranks[0, "q"] == ranks[2, "v"] == 4
    assert {ranks[layer, "down"] for layer in range(3)} == {16}
    assert adapter.rank == 16
    assert (0, "k") not in ranks


def test_modules_by_expression_and_by_layer(
    models: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    expression = r".*\.(self_attn\.(q|k)_proj|mlp\.up_proj)"
    adapter = assert_equals_peft(models["llama"], tmp_path / "a", seed, target_modules=expression)
    assert {kind for _, kind in adapter.modules} == {"q", "k", "up"}
    adapter = assert_equals_peft(
        models["llama"],
        tmp_path / "b",
        seed,
        target_modules=["gate_proj", "o_proj"],
        layers_to_transform=[0, 2],
        layers_pattern="layers",
    )
    assert {layer for layer, _ in adapter.modules} == {0, 2}
    # Modules that are named in full are of no layer in particular.
    adapter = assert_equals_peft(
        models["llama"],
        tmp_path / "c",
        seed,
        target_modules=["q_proj", "model.layers.0.self_attn.o_proj", "lm_head"],
        layers_to_transform=[1],
    )
    assert set(adapter.modules) == {(1, "q"), (0, "o")}
    assert adapter.lm_head is not None


Rename = Callable[[str], str]


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.removeprefix(PREFIX),
        lambda name: name.replace("base_model.model.model.", ""),
        lambda name: name.replace("base_model.model.model.", "base_model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.removesuffix(".weight"),
        lambda name: name.replace("model.model.", "model.model.language_model."),
    ],
)
def test_names_with_and_without_prefixes(tmp_path: Path, seed: int, rename: Rename) -> None:
    config = tiny_config("llama")
    model = ModelConfig.from_dict(config)
    tensors = adapter_tensors(config, seed)
    plain = read_adapter(write_adapter(tmp_path / "plain", tensors), model, max_rank=8)
    renamed = {rename(name): tensor for name, tensor in tensors.items()}
    other = read_adapter(write_adapter(tmp_path / "renamed", renamed), model, max_rank=8)
    assert other.modules.keys() == plain.modules.keys()
    for key, pair in plain.modules.items():
        assert torch.equal(other.modules[key].a, pair.a)
        assert torch.equal(other.modules[key].b, pair.b)
    assert other.digest != plain.digest


def test_fused_checkpoints(tmp_path: Path, seed: int) -> None:
    config = tiny_config("llama")
    generator = torch.Generator().manual_seed(seed)
    shapes = {"self_attn.qkv_proj": (72, 240), "mlp.gate_up_proj": (72, 272)}
    tensors = {
        f"{PREFIX}model.layers.1.{module}.lora_{half}.weight": torch.randn(
            (4, width) if half == "A" else (out, 4), generator=generator
        )
        for module, (width, out) in shapes.items()
        for half in ("A", "B")
    }
    path = write_adapter(
        tmp_path, tensors, r=4, lora_alpha=6, target_modules=["qkv_proj", "gate_up_proj"]
    )
    adapter = read_adapter(path, ModelConfig.from_dict(config), max_rank=8)
    assert set(adapter.modules) == {(1, kind) for kind in ("q", "k", "v", "gate", "up")}
    for module, kinds in (("self_attn.qkv_proj", "q k v"), ("mlp.gate_up_proj", "gate up")):
        a, b = (tensors[f"{PREFIX}model.layers.1.{module}.lora_{half}.weight"] for half in "AB")
        pairs = [adapter.modules[1, kind] for kind in kinds.split()]
        ours = torch.cat([pair.b @ pair.a for pair in pairs])
        assert torch.allclose(ours, 1.5 * b @ a, rtol=1e-5, atol=1e-5)


def test_tensors_come_in_the_dtype_that_is_asked_for(tmp_path: Path, seed: int) -> None:
    config = tiny_config("llama")
    path = make_adapter(tmp_path, config, seed)
    model = ModelConfig.from_dict(config)
    exact = read_adapter(path, model, max_rank=8)
    rounded = read_adapter(path, model, max_rank=8, dtype=torch.bfloat16)
    for key, pair in exact.modules.items():
        assert torch.equal(rounded.modules[key].a, pair.a.bfloat16())
        assert torch.equal(rounded.modules[key].b, pair.b.bfloat16())
    assert exact.num_bytes == 2 * rounded.num_bytes
    assert exact.num_bytes == sum(
        tensor.nbytes for tensor in load_file(path / WEIGHTS_FILE).values()
    )
    assert read_adapter(path, model, max_rank=8, max_bytes=exact.num_bytes).digest == exact.digest
    with pytest.raises(AdapterError, match=f"take {exact.num_bytes} bytes .* limit is 1000"):
        read_adapter(path, model, max_rank=8, max_bytes=1000)


def test_the_digest_names_the_content(tmp_path: Path, seed: int) -> None:
    config = tiny_config("llama")
    model = ModelConfig.from_dict(config)
    tensors = adapter_tensors(config, seed, layers=[0])
    first = write_adapter(tmp_path / "first", tensors, lora_dropout=0.1)
    same = write_adapter(tmp_path / "same", tensors, base_model_name_or_path="/elsewhere")
    digest = adapter_digest(first)
    assert len(digest) == 32
    assert digest == adapter_digest(same) == read_adapter(same, model, max_rank=8).digest
    others = [
        write_adapter(tmp_path / "alpha", tensors, lora_alpha=17),
        write_adapter(tmp_path / "rslora", tensors, use_rslora=True),
        write_adapter(tmp_path / "pattern", tensors, alpha_pattern={"q_proj": 1, ".*": 2}),
        write_adapter(tmp_path / "activated", tensors, alora_invocation_tokens=[5]),
        write_adapter(tmp_path / "order", tensors, alpha_pattern={".*": 2, "q_proj": 1}),
    ]
    name = next(iter(tensors))
    tensors[name][0, 0] += 1
    others.append(write_adapter(tmp_path / "weights", tensors))
    digests = [adapter_digest(path) for path in others]
    digests += [digest, adapter_digest(first, is_lenient=True)]
    assert len(set(digests)) == len(digests)
    lenient = read_adapter(first, model, max_rank=8, is_lenient=True)
    assert lenient.digest == digests[-1]
