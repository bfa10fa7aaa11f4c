"""Qwen3-MoE: its checkpoints, its configuration, and prefill apart from decode."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from weft.checkpoint.config import ModelConfig, MoEConfig
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.testing.draws import draw_until
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import Choices, asks_surely
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import fuse_experts, make_tiny, save_weights, tiny_config

VOCAB = 517
MIXED = {"num_hidden_layers": 4, "decoder_sparse_step": 2}


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return make_tiny("qwen3_moe", tmp_path / "split", random.randrange(10**6), **MIXED)


def logits(path: Path) -> torch.Tensor:
    model = load_model(path, "float32").model
    return PagedDriver(model, 8).step([(PagedRequest(), [5, 99, 12, 300, 41, 7, 7])])


def test_experts_are_read_one_by_one_or_all_in_one_tensor(model_dir: Path, tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", **MIXED)
    weights = load_file(model_dir / "model.safetensors")
    fuse_experts(config, weights)
    fused = make_tiny("qwen3_moe", tmp_path / "fused", **MIXED)
    save_weights(fused, weights, shards=2)
    (fused / "model.safetensors").unlink()
    assert torch.equal(logits(fused), logits(model_dir))


def test_tensors_of_experts_that_do_not_fit_are_named(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    name = "model.layers.1.mlp.experts.6.down_proj.weight"
    kept = weights.pop(name)
    save_weights(model_dir, weights)
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.experts\.6\.down_proj"):
        load_model(model_dir, "float32")
    save_weights(model_dir, {**weights, name: kept, name.replace("6", "7"): kept.clone()})
    with pytest.raises(ModelError, match=r"does not use: .*experts\.7"):
        load_model(model_dir, "float32")
    weights[name] = kept[:, 1:].contiguous()
    save_weights(model_dir, weights)
    with pytest.raises(ModelError, match=r"experts\.6\.down_proj.* has shape"):
        load_model(model_dir, "float32")


def parse(**overrides: Any) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config("qwen3_moe", **overrides))


def test_the_configuration_says_which_layers_have_experts() -> None:
    moe = parse(decoder_sparse_step=2, mlp_only_layers=[3]).moe
    assert moe == MoEConfig(
        num_experts=7,
        num_experts_per_tok=3,
        intermediate_size=44,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=(3,),
    )
    assert [layer for layer in range(8) if moe.is_sparse(layer)] == [1, 5, 7]
    raw = tiny_config("qwen3_moe")
    raw["num_local_experts"] = raw.pop("num_experts")
    assert ModelConfig.from_dict(raw).moe == parse().moe
    assert ModelConfig.from_dict(tiny_config("qwen3")).moe is None


def test_experts_are_part_of_the_fingerprint() -> None:
    prints = {parse(**fields).fingerprint() for fields in ({}, {"num_experts_per_tok": 2})}
    assert len(prints) == 2
    assert b"moe" not in ModelConfig.from_dict(tiny_config("qwen3")).fingerprint()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_experts_per_tok", 8),
        ("num_experts_per_tok", None),
        ("moe_intermediate_size", 0),
        ("norm_topk_prob", 1),
        ("mlp_only_layers", [-1]),
        ("decoder_sparse_step", "2"),
    ],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        parse(**{field: value})
    assert caught.value.param == field


def test_dummy_weights_need_no_checkpoint(tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, "float32", dummy=True).model
    assert PagedDriver(model, 4).step([(PagedRequest(), [1, 2, 3])]).isfinite().all()


def greedy(reference: Any, length: int, count: int) -> tuple[list[int], list[int]]:
    """A random prompt and its greedy continuation, drawn anew until rounding cannot change which
    experts they ask.
    """

    def draw() -> tuple[list[int], list[int]]:
        prompt = [random.randrange(3, VOCAB) for _ in range(length)]
        return prompt, Choices(lambda ids: reference(torch.tensor([ids])).logits[0], prompt, count)

    return draw_until(draw, lambda drawn: asks_surely(reference, [*drawn[0], *drawn[1]]))


def test_tokens_are_transformers_with_prefill_apart_and_together(model_dir: Path) -> None:
    clock = ManualClock()
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    made = [greedy(reference, length, 8) for length in (5, 24, 61)]
    prompts, expected = map(list, zip(*made, strict=True))
    for fillers in (["prefill"], []):
        owner = make_engine(model_dir, "decode", clock)
        pair = EnginePair(owner, [make_engine(model_dir, name, clock) for name in fillers], clock)
        try:
            asked = [pair.submit(prompt) for prompt in prompts]
            assert pair.finish(*asked) == expected
            shipped = sum(pair.answers[i].finished[0].timeline.fills != [] for i in asked)
            assert shipped == (2 if fillers else 0)
            pair.settle()
        finally:
            pair.close()
