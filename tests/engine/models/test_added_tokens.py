"""Adapters that add tokens to the model's vocabulary: tokens and logits are PEFT's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from weft.chaos.tiny import write_tokenizer
from weft.contract.errors import AdapterError, ConfigError
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM, GeneratedSample
from weft.testing.models.choices import check_choices
from weft.testing.models.lora_reference import BASE, PeftModels, unload_all
from weft.testing.models.tiny_adapters import peft_model
from weft.testing.models.tiny_drafts import make_tiny_draft, make_tiny_eagle
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("single_thread")

VOCAB = 517
NUM_NEW = 8
ROOM = 6
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "page_size": 8,
    "num_pages": 200,
    "prefill_chunk_tokens": 16,
    "poison_free_pages": True,
    "enable_lora": True,
    "lora_added_tokens": ROOM,
    "lora_projections": ("q", "v", "down", "embed_tokens", "lm_head"),
}


class GrownModels(PeftModels):
    """Adapters of which each knows so many tokens."""

    def __init__(self, folder: Path, seed: int, *, is_tied: bool) -> None:
        overrides = {"vocab_size": VOCAB, "num_hidden_layers": 2, "tie_word_embeddings": is_tied}
        super().__init__(make_tiny("llama", folder / "model", seed=seed, **overrides), folder)
        self.ends = {BASE: VOCAB}

    def grow(self, seed: int, num_added: int, **settings: Any) -> bytes:
        """An adapter that adds tokens, likely ones, beside what `settings` say."""
        directory = self._folder / f"grown-{len(self.directories)}"
        model = peft_model(self.model_dir, seed, resize=VOCAB + num_added, **settings)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
                rows = layer.weight[VOCAB:]  # None, where it takes rows away.
                rows += 0.5 * torch.randn(rows.shape, generator=generator)
        model.save_pretrained(directory)
        digest = self.put(directory, model)
        self.ends[digest] = VOCAB + num_added
        return digest


MOST_DRAWS = 6
"""Most sets of random models, until one generates what a test is about."""


def make_models(tmp_path: Path, *, is_tied: bool) -> GrownModels:
    """Adapters that add tokens in every way that there is, beside others that do not."""
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    models = GrownModels(tmp_path, seed, is_tied=is_tied)
    tie = {"ensure_weight_tying": True} if is_tied else {}
    models.grow(seed, 5, r=8, target_modules=["q_proj"])
    vocabulary = ["embed_tokens", "q_proj"] if is_tied else ["embed_tokens", "lm_head", "q_proj"]
    models.grow(seed + 1, ROOM, r=4, target_modules=vocabulary, **tie)
    trained = {"trainable_token_indices": [3, 50, VOCAB, VOCAB + 2]}
    models.grow(seed + 2, 3, r=8, target_modules=["v_proj"], **trained)
    models.ends[models.add(seed + 3, r=8, target_modules=["lm_head"], **tie)] = VOCAB
    return models


def check(models: GrownModels, **settings: Any) -> set[int]:
    """All adapters and none in one batch; returns the added tokens that were generated."""
    found = set()
    with LLM(models.model_dir, **{**SETTINGS, **settings}) as llm:
        for directory in models.directories.values():
            llm.load_adapter(directory)
        adapters = [*models.digests, BASE, *models.digests]
        prompts = []
        for adapter in adapters:
            end = models.ends[adapter]
            prompt = [random.randrange(3, end) for _ in range(random.randint(1, 40))]
            prompts.append([*prompt, *range(VOCAB, end)])
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        samples = llm.generate(prompts, stop=stop, top_logprobs=20, adapters=adapters)
        for adapter, prompt, sample in zip(adapters, prompts, samples, strict=True):
            models.check(adapter, prompt, sample)
            ids = [token for one in sample.logprobs for token, _ in one.top]
            assert max([*ids, *sample.token_ids]) < models.ends[adapter]
            found |= {token for token in sample.token_ids if token >= VOCAB}
        unload_all(llm.engine)
    return found


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_texts_are_pefts(is_tied: bool, tmp_path: Path) -> None:
    for number in range(MOST_DRAWS):
        models = make_models(tmp_path / str(number), is_tied=is_tied)
        if check(models):  # At times none of the random models generates an added token.
            check(models, max_loras=1)
            return
    pytest.fail("no added token was generated: nothing was shown")


@pytest.mark.parametrize("is_tied", [False, True], ids=["apart", "tied"])
def test_beside_whole_matrices(is_tied: bool, tmp_path: Path) -> None:
    models = make_models(tmp_path, is_tied=is_tied)
    saved = ["embed_tokens"] if is_tied else ["embed_tokens", "lm_head"]
    tie = {"ensure_weight_tying": True} if is_tied else {}
    models.grow(1, 4, r=8, target_modules=["q_proj"], modules_to_save=saved, **tie)
    check(models, lora_whole_matrices=1)


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("drafter", ["model", "ngram", "eagle", "eagle3"])
def test_drafts_know_the_models_tokens_only(drafter: str, shares: bool, tmp_path: Path) -> None:
    """Added tokens in prompts and answers do not disturb what drafts, with the model's embedding or
    with one of its own.
    """
    models, seed = make_models(tmp_path, is_tied=False), random.randrange(2**31)
    settings: dict[str, Any] = {"drafter": drafter, "max_draft_tokens": 3}
    if drafter == "model":
        overrides = {"vocab_size": VOCAB, "num_hidden_layers": 1}
        settings["draft_dir"] = make_tiny("llama", tmp_path / "draft", seed=seed, **overrides)
    elif drafter == "eagle":
        settings["draft_dir"] = make_tiny_eagle(
            tmp_path / "draft", models.model_dir, seed, shares=shares
        )
    elif drafter == "eagle3":
        settings["draft_dir"] = make_tiny_draft(
            tmp_path / "draft",
            models.model_dir,
            seed,
            shares=shares,
            eagle_aux_hidden_state_layer_ids=[0, 1, 1],
        )
    check(models, **settings)


def test_projections_must_name_what_they_change(tmp_path: Path) -> None:
    models = GrownModels(tmp_path, 1, is_tied=False)
    with pytest.raises(ConfigError, match="lora_projections does not name lm_head"):
        LLM(models.model_dir, **{**SETTINGS, "lora_projections": ("q", "embed_tokens")})


def test_more_than_there_is_room_for_is_refused(tmp_path: Path) -> None:
    """By a name, with the setting."""
    models = GrownModels(tmp_path, random.randrange(2**31), is_tied=False)
    digest = models.grow(7, ROOM + 2, r=4, target_modules=["q_proj"])
    problem = rf"embed_tokens\S* has {VOCAB + ROOM + 2} tokens, {ROOM + 2} more than the model"
    with (
        LLM(models.model_dir, **SETTINGS) as llm,
        pytest.raises(AdapterError, match=rf"{problem}: .* lora_added_tokens = {ROOM} take"),
    ):
        llm.load_adapter(models.directories[digest])


@pytest.mark.parametrize("room", [0, ROOM])
def test_a_lenient_load_leaves_them_out(room: int, tmp_path: Path) -> None:
    """All of them, whether there is room or not: the rest is what the adapter is without them."""
    models = GrownModels(tmp_path, random.randrange(2**31), is_tied=False)
    digest = models.grow(7, 3, r=4, target_modules=["q_proj"])
    with LLM(models.model_dir, **{**SETTINGS, "lora_added_tokens": room}) as llm:
        cut = llm.load_adapter(models.directories[digest], is_lenient=True)
        (state,) = llm.engine.adapters.states()
        assert set(state.left_out) == {
            f"base_model.model.{name}.weight[{VOCAB}:{VOCAB + 3}]"
            for name in ("lm_head", "model.embed_tokens")
        }
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        prompts = [[random.randrange(3, VOCAB) for _ in range(30)] for _ in range(8)]
        samples = llm.generate(prompts, stop=stop, adapters=[cut] * len(prompts))
    compare(models, digest, prompts, samples, VOCAB)


def test_rows_that_no_token_has_may_be_missing(tmp_path: Path) -> None:
    """Models have more rows than tokens; who resizes the vocabulary to len(tokenizer) + 2 takes
    rows away, and the new tokens have rows of the model.
    """
    models = GrownModels(tmp_path, random.randrange(2**31), is_tied=False)
    digest = models.grow(7, -4, r=4, target_modules=["q_proj"], trainable_token_indices=[3, 511])
    settings = {**SETTINGS, "lora_added_tokens": 0}
    with LLM(models.model_dir, **settings) as llm, pytest.raises(AdapterError, match="fewer rows"):
        llm.load_adapter(models.directories[digest])
    write_tokenizer(models.model_dir, VOCAB - 6, max_context_tokens=2048)
    with LLM(models.model_dir, **settings) as llm:
        llm.load_adapter(models.directories[digest])
        stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
        prompts = [[random.randrange(3, VOCAB - 4) for _ in range(30)] for _ in range(8)]
        samples = llm.generate(prompts, stop=stop, adapters=[digest] * len(prompts))
    compare(models, digest, prompts, samples, VOCAB - 4)


def compare(
    models: GrownModels,
    digest: bytes,
    prompts: list[list[int]],
    samples: list[GeneratedSample],
    end: int,
) -> None:
    """Tokens are PEFT's most likely ones below `end`, up to the first one beyond."""
    num_compared = 0
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = list(prompt)
        for token in sample.token_ids:
            if token >= end:
                break
            with torch.no_grad():
                logits = models._models[digest](torch.tensor([ids])).logits[0, -1, :end]
            check_choices(logits[None], [token])
            ids.append(token)
            num_compared += 1
    assert num_compared > len(prompts)
