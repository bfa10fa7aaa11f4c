"""Directories of EAGLE-3 heads: every way of naming is read, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.checkpoint.eagle3_config import default_aux_layers
from weft.contract.errors import ModelError
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.drafted import DraftedModel, check_width
from weft.engine.model.heads.eagle3 import load_eagle3
from weft.engine.model.interface import LogitsInParts
from weft.engine.model.loader import load_model
from weft.testing.models.tiny_drafts import Tensors, head_entries, make_tiny_draft
from weft.testing.models.tiny_models import make_tiny


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def target(target_dir: Path) -> DecoderOnlyLM:
    model = load_model(target_dir, "float32").model
    assert isinstance(model, DecoderOnlyLM)
    return model


@pytest.mark.parametrize(
    "naming",
    [
        {"prefix": "model."},
        {"layer": "layers.0"},
        {"prefix": "model.", "layer": "layers.0"},
        {"eagle_aux_hidden_state_layer_ids": list(default_aux_layers(6))},
        {"target_hidden_size": 72},
        {"architectures": ["LlamaForCausalLM"]},
        {"speculators": True, "layer": "layers.0"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ],
)
def test_a_head_is_the_same_by_any_name(
    naming: dict[str, Any], target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    plain = make_tiny_draft(tmp_path / "plain", target_dir, 7)
    named = make_tiny_draft(tmp_path / "named", target_dir, 7, **naming)
    assert torch.equal(head_entries(target, plain), head_entries(target, named))
    other = make_tiny_draft(tmp_path / "other", target_dir, 8)
    assert not torch.equal(head_entries(target, plain), head_entries(target, other))


@pytest.mark.parametrize("has_ranks", [False, True])
@pytest.mark.parametrize("are_on_gpus", [False, True])
@pytest.mark.parametrize("width", [64, 96])
def test_ranks_on_gpus_take_heads_of_the_models_width_alone(
    width: int, are_on_gpus: bool, has_ranks: bool
) -> None:
    peers = SimpleNamespace(width=64 if are_on_gpus else None) if has_ranks else None
    stack = SimpleNamespace(peers=peers)
    model = SimpleNamespace(model=stack, config=SimpleNamespace(hidden_size=64))
    given = cast("Any", SimpleNamespace(hidden_size=width)), cast("Any", model), Path("head")
    if not (width != 64 and are_on_gpus and has_ranks):
        check_width(*given)
        return
    with pytest.raises(ModelError, match="hidden_size is 96, the model's 64") as why:
        check_width(*given)
    assert why.value.param == "draft_dir"


def test_ranks_divide_the_lm_head_of_a_model_with_a_head(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = load_eagle3(make_tiny_draft(tmp_path, target_dir), target)
    drafted, parts = DraftedModel(target, head, 2, 8), []
    monkeypatch.setattr(target, "logits_part", lambda *given: parts.append(given))
    assert isinstance(drafted, LogitsInParts)
    drafted.logits_part(hidden := torch.randn(2, 64), slice(3, 9))
    assert parts == [(hidden, slice(3, 9))]


def test_a_head_for_all_tokens_needs_no_map(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    path = make_tiny_draft(tmp_path, target_dir, draft_vocab_size=517, shares=False)
    change_tensors(path, lambda t: [t.pop("d2t"), t.pop("t2d")])
    load_eagle3(path, target)


def test_layouts_name_the_head_that_wrote_them(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    plain = target.kv_layout(16)
    plane = plain.plane
    descriptions = set()
    for seed, eps in ((1, 1e-5), (2, 1e-5), (1, 1e-6)):
        path = make_tiny_draft(tmp_path / f"{seed}-{eps}", target_dir, seed, rms_norm_eps=eps)
        layout = DraftedModel(target, load_eagle3(path, target), 1, 16).kv_layout(16)
        assert layout.page_shape == (plane.heads, plane.layers + 1, 2, 16, plane.dim)
        descriptions.add(layout.describe())
    assert len(descriptions) == 3
    assert plain.describe() == (
        "plane=target;layers=6;heads=2;parts=k:24:float32,v:24:float32;page_size=16;"
        "order=head,layer,part,position,dim"
    )


def change_config(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLMEagle"]}, "architectures.*not those of EAGLE-3"),
    ({"architectures": ["Qwen2ForCausalLM"]}, "architectures.*'Qwen2ForCausalLM'.*EAGLE-1"),
    ({"architectures": ["Eagle3Speculator"]}, "architectures.*'Eagle3Speculator'.*speculators"),
    ({"speculators_model_type": "eagle"}, "speculators_model_type.*'eagle'"),
    ({"speculators_model_type": "eagle3"}, "num_hidden_layers.*one layer"),
    ({"norm_before_fc": True}, "norm_before_fc"),
    ({"fc_norm": True}, "fc_norm"),
    ({"norm_output": True}, "norm_output"),
    ({"architectures": None}, "architectures"),
    ({"num_hidden_layers": 2}, "num_hidden_layers.*one layer"),
    ({"draft_vocab_size": None}, "draft_vocab_size"),
    ({"draft_vocab_size": 600}, "draft_vocab_size.*600.*517"),
    ({"vocab_size": 516}, "vocab_size of the draft head is 516.*517"),
    ({"hidden_size": 64}, "target_hidden_size of the draft head is 64.*72"),
    ({"hidden_size": 64, "target_hidden_size": 72}, "64 wide states cannot share.*72"),
    ({"num_key_value_heads": 1}, "num_key_value_heads of the draft head is 1.*2"),
    ({"num_attention_heads": 3}, "num_key_value_heads.*does not divide"),
    ({"head_dim": 18}, "head_dim of the draft head is 18.*24"),
    ({"intermediate_size": 100}, r"gate_proj.weight has shape \(104, 72\).*\(100, 72\)"),
    ({"hidden_act": "gelu"}, "hidden_act.*gelu"),
    ({"attention_bias": True}, "attention_bias"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type.*spiral"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}, "layer_ids.*layer 6 .*6 layers"),
    ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "layer_ids.*3 layers, got 2"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, "layer_ids.*layer 6"),
]


@pytest.mark.parametrize(("fields", "message"), BAD_CONFIGS)
def test_a_head_that_does_not_fit_is_refused(
    fields: dict[str, Any], message: str, target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    path = make_tiny_draft(tmp_path, target_dir)
    change_config(path, **fields)
    with pytest.raises(ModelError, match=message) as caught:
        load_eagle3(path, target)
    assert str(path) in str(caught.value)


def swap(tensors: Tensors, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors[name] = change(tensors[name]).contiguous()


BAD_TENSORS: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("midlayer.hidden_norm.weight"), "lacks.*midlayer.hidden_norm.weight"),
    (lambda t: t.pop("fc.weight"), "lacks.*fc.weight"),
    (lambda t: t.pop("d2t"), "lacks.*d2t"),
    (lambda t: swap(t, "fc.weight", lambda x: x[:, :144]), "fc.weight.*EAGLE-1"),
    (lambda t: swap(t, "fc.weight", lambda x: x[:, :200]), r"fc.weight.*\(72, 200\).*\(72, 216\)"),
    (
        lambda t: swap(t, "midlayer.self_attn.q_proj.weight", lambda x: x[:, :72]),
        r"q_proj.weight.*\(96, 72\).*\(96, 144\)",
    ),
    (lambda t: t.update({"lm_head.weight": torch.zeros(517, 72)}), r"lm_head.weight.*\(150, 72\)"),
    (lambda t: t.update({"midlayer.self_attn.q_proj.bias": torch.zeros(96)}), "does not use.*bias"),
    (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(3)}), "does not use.*layers.1"),
    (lambda t: swap(t, "d2t", lambda x: x[:149]), r"d2t.*\(149,\).*\(150,\)"),
    (lambda t: swap(t, "d2t", lambda x: x.float()), "d2t is F32"),
    (lambda t: swap(t, "d2t", lambda x: x + 517), "d2t leads to tokens"),
    (lambda t: swap(t, "d2t", lambda x: x - 517), "d2t leads to tokens"),
    (lambda t: swap(t, "d2t", lambda x: -torch.arange(150)), "several of the head's tokens to one"),
    (lambda t: swap(t, "t2d", lambda x: x.roll(1)), "t2d and d2t"),
    (lambda t: swap(t, "fc.weight", lambda x: x.long()), "fc.weight is I64"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS)
def test_a_damaged_head_is_refused(
    change: Callable[[Tensors], object],
    message: str,
    target: DecoderOnlyLM,
    target_dir: Path,
    tmp_path: Path,
) -> None:
    path = make_tiny_draft(tmp_path, target_dir)
    change_tensors(path, change)
    with pytest.raises(ModelError, match=message) as caught:
        load_eagle3(path, target)
    assert str(path) in str(caught.value)


def test_files_that_are_not_there_or_no_safetensors_are_refused(
    target: DecoderOnlyLM, target_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        load_eagle3(tmp_path / "nowhere", target)
    path = make_tiny_draft(tmp_path / "draft", target_dir)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="cannot read"):
        load_eagle3(path, target)
    weights.rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only safetensors"):
        load_eagle3(path, target)
