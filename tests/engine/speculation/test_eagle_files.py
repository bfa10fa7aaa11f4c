"""Directories of EAGLE-1 and EAGLE-2 heads: published ones are read, misfits refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.draft_head import load_draft_head
from weft.engine.model.heads.drafted import DraftedModel
from weft.engine.model.loader import load_model
from weft.testing.models.tiny_drafts import Tensors, head_entries, make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=2)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> DecoderOnlyLM:
    model = load_model(target_dir, "float32").model
    assert isinstance(model, DecoderOnlyLM)
    return model


def change_config(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: {**config, "architectures": ["LlamaForCausalLMEagle"]},
        lambda config: {**config, "architectures": ["EagleLlamaForCausalLM"]},
        lambda config: {"model_type": "eagle", "model": config},
    ],
    ids=["sglang", "vllm", "nested"],
)
def test_a_head_is_the_same_by_any_name(
    change: Callable[[dict[str, Any]], dict[str, Any]],
    target: DecoderOnlyLM,
    target_dir: Path,
    tmp_path: Path,
) -> None:
    plain = make_tiny_eagle(tmp_path / "plain", target_dir, 7)
    named = make_tiny_eagle(tmp_path / "named", target_dir, 7)
    change_config(named, change)
    assert torch.equal(head_entries(target, plain), head_entries(target, named))
    other = make_tiny_eagle(tmp_path / "other", target_dir, 8)
    assert not torch.equal(head_entries(target, plain), head_entries(target, other))


def test_a_head_with_the_targets_own_embedding_is_that_without(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    plain = make_tiny_eagle(tmp_path / "plain", target_dir, 7)
    bringing = make_tiny_eagle(tmp_path / "bringing", target_dir, 7)
    embedding = target.model.embed_tokens
    change_tensors(bringing, lambda t: t.update({"embed_tokens.weight": embedding.clone()}))
    assert torch.equal(head_entries(target, plain), head_entries(target, bringing))


def test_layouts_tell_kinds_of_heads_apart(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    heads = [
        make_tiny_eagle(tmp_path / "a", target_dir, 1),
        make_tiny_eagle(tmp_path / "b", target_dir, 2),
        make_tiny_draft(tmp_path / "c", target_dir, 1, eagle_aux_hidden_state_layer_ids=[0, 1, 1]),
    ]
    models = [DraftedModel(target, load_draft_head(head, target), 1, 16) for head in heads]
    assert len({model.kv_layout(16).describe() for model in models}) == 3
    assert [model.head.kind for model in models] == ["eagle", "eagle", "eagle3"]


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaModel"]}, "architectures.*'LlamaModel'.*EAGLE-1"),
    ({"num_hidden_layers": 2}, "num_hidden_layers.*one layer"),
    ({"vocab_size": 516}, "vocab_size of the draft head is 516.*517"),
    ({"hidden_size": 64}, "hidden_size of the draft head is 64.*72"),
    ({"num_key_value_heads": 1}, "num_key_value_heads of the draft head is 1.*2"),
    ({"num_attention_heads": 3}, "num_key_value_heads.*does not divide"),
    ({"head_dim": 18}, "head_dim of the draft head is 18.*24"),
    ({"intermediate_size": 100}, r"gate_proj.weight has shape \(104, 72\).*\(100, 72\)"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"attention_bias": True}, "attention_bias"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_head_that_does_not_fit_is_refused(
    fields: dict[str, Any], message: str, target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    path = make_tiny_eagle(tmp_path, target_dir)
    change_config(path, lambda config: {**config, **fields})
    with pytest.raises(ModelError, match=message) as caught:
        load_draft_head(path, target)
    assert str(path) in str(caught.value)


BAD_TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("fc.weight"), "lacks.*fc.weight"),
    (lambda t: t.update({"fc.weight": torch.zeros(72, 216)}), "fc.weight.*EAGLE-3"),
    (lambda t: t.update({"fc.weight": torch.zeros(72, 72)}), r"fc.weight.*\(72, 72\).*\(72, 144\)"),
    (lambda t: t.pop("layers.0.self_attn.k_proj.weight"), "lacks.*k_proj"),
    (lambda t: t.update({"lm_head.weight": torch.zeros(500, 72)}), r"lm_head.*\(500, 72\)"),
    (
        lambda t: t.update({"layers.0.input_layernorm.weight": torch.ones(72)}),
        "does not use.*input_layernorm",
    ),
    (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(3)}), "does not use.*layers.1"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_a_damaged_head_is_refused(
    change: Callable[[Tensors], object],
    message: str,
    target: DecoderOnlyLM,
    target_dir: Path,
    tmp_path: Path,
) -> None:
    path = make_tiny_eagle(tmp_path, target_dir)
    change_tensors(path, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_draft_head(path, target)
    assert str(path) in str(caught.value)
