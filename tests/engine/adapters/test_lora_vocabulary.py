"""Adapters that change the embedding or the LM head mean what they mean to PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.contract.errors import AdapterError
from weft.testing.models.merged_adapters import VOCAB, assert_equals_peft, assert_same_logits, read
from weft.testing.models.tiny_adapters import CONFIG_FILE, PREFIX, WEIGHTS_FILE, peft_model
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

EMBEDDING = f"{PREFIX}model.embed_tokens"


@pytest.fixture(scope="module", params=["untied", "tied"])
def model_dir(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> Path:
    is_tied = request.param == "tied"
    folder = tmp_path_factory.mktemp("model")
    return make_tiny("llama", folder, seed, num_hidden_layers=2, tie_word_embeddings=is_tied)


def test_low_rank_changes(model_dir: Path, tmp_path: Path, seed: int) -> None:
    adapter = assert_equals_peft(
        model_dir,
        tmp_path,
        seed,
        r=4,
        lora_alpha=6,
        target_modules=["embed_tokens", "lm_head", "v_proj"],
        rank_pattern={"lm_head": 12},
    )
    assert adapter.embed_tokens is not None
    assert adapter.lm_head is not None
    assert adapter.embed_tokens.lora is not None
    assert adapter.embed_tokens.lora.rank == 4
    assert adapter.lm_head.lora is not None
    assert adapter.lm_head.lora.rank == 12
    assert adapter.rank == 12


@pytest.mark.parametrize("saved", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_whole_matrices(model_dir: Path, tmp_path: Path, seed: int, saved: list[str]) -> None:
    adapter = assert_equals_peft(
        model_dir, tmp_path, seed, target_modules=["q_proj"], modules_to_save=saved
    )
    changes = {"embed_tokens": adapter.embed_tokens, "lm_head": adapter.lm_head}
    assert {name for name, change in changes.items() if change is not None} == set(saved)


def test_rows_of_single_tokens(model_dir: Path, tmp_path: Path, seed: int) -> None:
    adapter = assert_equals_peft(
        model_dir,
        tmp_path,
        seed,
        spread=2.0,
        target_modules=["q_proj"],
        trainable_token_indices=[*range(3, 200, 2)],
    )
    assert adapter.embed_tokens is not None
    assert adapter.embed_tokens.token_ids == tuple(range(3, 200, 2))


def make_tied(folder: Path, seed: int) -> Path:
    """A model whose LM head is its embedding."""
    return make_tiny("llama", folder / "base", seed, num_hidden_layers=2, tie_word_embeddings=True)


def test_tied_matrices_change_together_when_the_adapter_says_so(tmp_path: Path, seed: int) -> None:
    base = make_tied(tmp_path, seed)
    saved = assert_equals_peft(
        base,
        tmp_path / "saved",
        seed,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens"],
        ensure_weight_tying=True,
    )
    assert saved.lm_head is not None
    lora = assert_equals_peft(
        base,
        tmp_path / "lora",
        seed,
        target_modules=["q_proj", "embed_tokens"],
        ensure_weight_tying=True,
    )
    assert lora.lm_head is not None


@pytest.mark.parametrize(
    "settings",
    [
        {"rank_pattern": {"embed_tokens": 4}},
        {"rank_pattern": {"embed_tokens": 4, "lm_head": 12}, "use_rslora": True},
        {"alpha_pattern": {"lm_head": 31}},
        {"exclude_modules": ["lm_head"]},
    ],
)
def test_a_tied_head_takes_the_embeddings_matrices(
    tmp_path: Path, seed: int, settings: dict[str, Any]
) -> None:
    """Of their rank, scaled by its own alpha and configured rank, and excluded by nothing."""
    base = make_tied(tmp_path, seed)
    adapter = assert_equals_peft(
        base,
        tmp_path / "adapter",
        seed,
        target_modules=["q_proj", "embed_tokens"],
        ensure_weight_tying=True,
        **settings,
    )
    assert adapter.lm_head is not None


def test_trained_tokens_reach_a_tied_head_that_has_lora(tmp_path: Path, seed: int) -> None:
    """PEFT ties them whatever else the head has."""
    base = make_tied(tmp_path, seed)
    adapter = assert_equals_peft(
        base,
        tmp_path / "adapter",
        seed,
        spread=1.0,
        target_modules=["lm_head", "q_proj"],
        trainable_token_indices=[5, 6, 400],
    )
    assert adapter.lm_head is not None
    assert adapter.lm_head.token_ids == (5, 6, 400)
    assert adapter.lm_head.lora is not None


def test_added_tokens(model_dir: Path, tmp_path: Path, seed: int) -> None:
    expected: Any = peft_model(
        model_dir,
        seed,
        resize=VOCAB + 3,
        target_modules=["q_proj"],
        modules_to_save=["embed_tokens", "lm_head"],
    )
    expected.save_pretrained(tmp_path)
    adapter = read(tmp_path, model_dir)
    assert adapter.embed_tokens is not None
    assert adapter.embed_tokens.weight is not None
    assert adapter.embed_tokens.weight.shape == (VOCAB + 3, 72)
    assert_same_logits(model_dir, adapter, expected, seed)


def test_what_does_not_fit_is_refused(model_dir: Path, tmp_path: Path, seed: int) -> None:
    saved = peft_model(model_dir, seed, target_modules=["q_proj"], modules_to_save=["embed_tokens"])
    saved.save_pretrained(tmp_path)
    with pytest.raises(AdapterError, match=rf"{EMBEDDING}\.weight: .*\(embed_tokens\) are not"):
        read(tmp_path, model_dir, parts=["dense"])
    assert read(tmp_path, model_dir, parts=["dense"], is_lenient=True).ignored == (
        f"{EMBEDDING}.weight",
    )
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    whole = tensors[f"{EMBEDDING}.weight"]
    tensors[f"{EMBEDDING}.weight"] = whole[:-1].clone()
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=rf"{EMBEDDING}\.weight has shape \(516, 72\)"):
        read(tmp_path, model_dir)
    whole[5, 5] = torch.nan
    save_file({**tensors, f"{EMBEDDING}.weight": whole}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match=rf"{EMBEDDING}\.weight has NaN"):
        read(tmp_path, model_dir)
    del tensors[f"{EMBEDDING}.weight"]
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(AdapterError, match="modules_to_save: there is no tensor of 'embed_tokens'"):
        read(tmp_path, model_dir)


def test_token_indices_must_fit(model_dir: Path, tmp_path: Path, seed: int) -> None:
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 9]}
    peft_model(model_dir, seed, **settings).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    for ids, problem in (
        ([3, VOCAB], f"names token {VOCAB}"),
        ([3], r"has shape \(2, 72\)"),
        ([3, 3], "names a token twice"),
        ([3, -1], "expected lists of token ids"),
        (None, "does not name its module"),
    ):
        changed = {**config, "trainable_token_indices": ids}
        (tmp_path / CONFIG_FILE).write_text(json.dumps(changed))
        with pytest.raises(AdapterError, match=problem):
            read(tmp_path, model_dir)
