"""What workers can hold by default: what registered and expected adapters need."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.checkpoint.adapters.digest import adapter_digest
from weft.checkpoint.adapters.needs import needs_of
from weft.checkpoint.config import ModelConfig
from weft.common.adapters.manifest import Entry
from weft.common.adapters.registry import Registry
from weft.common.settings import load_settings
from weft.common.worker.adapter_needs import with_adapter_needs, with_needs
from weft.contract.errors import AdapterError
from weft.decode.main import DecodeSettings
from weft.engine.base.config import EngineConfig
from weft.engine.loop.combinations import check_combination
from weft.testing.models.tiny_adapters import (
    PREFIX,
    make_adapter,
    make_expert_adapter,
    vocabulary_tensors,
    write_adapter,
)
from weft.testing.models.tiny_models import tiny_config

DENSE = ("q", "k", "v", "o", "gate", "up", "down")
LLAMA, MIXTURE = tiny_config("llama"), tiny_config("qwen3_moe")


@pytest.fixture
def seed() -> int:
    found = random.randrange(10**6)
    print(f"seed {found}")
    return found


def write_model(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def whole(path: Path, rows: int, name: str = "lm_head") -> Path:
    tensors = {f"{PREFIX}{name}.weight": torch.randn(rows, LLAMA["hidden_size"])}
    return write_adapter(path, tensors, modules_to_save=[name])


def test_needs_beyond_the_default(tmp_path: Path, seed: int) -> None:
    model_dir = write_model(tmp_path / "llama", LLAMA)
    model = ModelConfig.load(model_dir)
    vocabulary = vocabulary_tensors(LLAMA, seed)
    head = {name: tensor for name, tensor in vocabulary.items() if "lm_head" in name}
    cases = (
        (make_adapter(tmp_path / "dense", LLAMA, seed), set(), 8, False, 0),
        (make_adapter(tmp_path / "high", LLAMA, seed, rank=96), set(), 96, False, 0),
        (
            write_adapter(tmp_path / "head", head, target_modules=["lm_head"]),
            {"lm_head"}, 8, False, 0,
        ),
        (whole(tmp_path / "saved", LLAMA["vocab_size"]), {"lm_head"}, 0, True, 0),
        (
            whole(tmp_path / "added", LLAMA["vocab_size"] + 3),
            {"embed_tokens", "lm_head"}, 0, True, 3,
        ),
    )  # fmt: skip
    for folder, *expected in cases:
        found = needs_of(folder, model_dir, model, 512)
        told = [found.projections, found.rank, found.has_whole_matrix, found.num_added_tokens]
        assert told == expected, folder


@pytest.mark.parametrize("is_shared", [True, False])
def test_needs_of_mixtures(is_shared: bool, tmp_path: Path, seed: int) -> None:
    model_dir = write_model(tmp_path / "mixture", MIXTURE)
    model = ModelConfig.load(model_dir)
    folder = make_expert_adapter(tmp_path / "a", model_dir, seed, 4, is_shared=is_shared)
    experts = "shared_experts" if is_shared else "experts"
    found = needs_of(folder, model_dir, model, 512)
    assert found.projections == {experts, "router"}
    config = EngineConfig(model_dir=model_dir, enable_lora=True)
    other = replace(found, projections=frozenset({"experts"}))
    made = with_needs(config, model, [found, other])
    assert set(made.lora_projections) >= {"q", "k", "v", "o", "experts", "router"}
    assert "shared_experts" not in made.lora_projections
    check_combination(made)
    assert experts in with_needs(config, model, [found]).lora_projections


def test_a_tied_embedding_needs_the_lm_head_too(tmp_path: Path, seed: int) -> None:
    model_dir = write_model(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True})
    vocabulary = vocabulary_tensors(LLAMA, seed)
    embedding = {name: tensor for name, tensor in vocabulary.items() if "embed" in name}
    settings = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    folder = write_adapter(tmp_path / "a", embedding, **settings)
    found = needs_of(folder, model_dir, ModelConfig.load(model_dir), 512)
    assert found.projections == {"embed_tokens", "lm_head"}


def test_workers_hold_what_is_registered_for_their_model_and_what_is_expected(
    tmp_path: Path, seed: int
) -> None:
    model_dir, root = write_model(tmp_path / "llama", LLAMA), tmp_path / "root"
    root.mkdir()
    whole(root / "saved", LLAMA["vocab_size"])
    make_adapter(root / "high", LLAMA, seed, rank=96)
    flags = ["--model-dir", str(model_dir), "--device", "cpu", "--adapter-root", str(root)]

    def made(*more: str, is_strict: bool = False) -> EngineConfig:
        settings = load_settings(DecodeSettings, [*flags, *more], {})
        return with_adapter_needs(
            settings, settings.engine_config("decode", "d"), is_strict=is_strict
        )

    assert made().lora_projections == ()
    expected = made("--expected-adapters", "saved,high")
    assert expected.lora_projections == (*DENSE, "lm_head")
    assert (expected.lora_whole_matrices, expected.max_lora_rank) == (1, 96)
    check_combination(expected)
    # What is named counts alone.
    named = made("--expected-adapters", "saved,high", "--lora-projections", "q,v")
    assert (named.lora_projections, named.max_lora_rank) == (("q", "v"), 64)
    registry = Registry(root)
    digest = registry.add_copy("saved", adapter_digest, 1 << 24)
    fields: dict[str, Any] = {"path": "saved", "generation": 0, "created": 1.0, "until": 1.0}
    for model, state in (("other", "serving"), ("llama", "retired")):
        entry = Entry(name="a", digest=digest.hex(), model=model, state=state, **fields)  # type: ignore[arg-type]
        registry.change(lambda old, entry=entry: replace(old, entries=(entry,)))  # type: ignore[misc]
        assert made().lora_projections == ()
    entry = Entry(name="a", digest=digest.hex(), model="llama", state="serving", **fields)
    registry.change(lambda old: replace(old, entries=(entry,)))
    assert made().lora_projections == (*DENSE, "lm_head")
    # One that cannot be read keeps no worker from its start, but `weft up` from starting any.
    assert made("--expected-adapters", "missing").lora_projections == (*DENSE, "lm_head")
    with pytest.raises(AdapterError, match="no such directory"):
        made("--expected-adapters", "missing", is_strict=True)
