"""The training of small hybrids with an MTP head, and the one that is kept."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from weft.contract.request import StopCriteria
from weft.engine.loop.llm import LLM
from weft.testing.models.threads import one_thread

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
try:
    from hybrid_training.export import dequantised, export, load
    from hybrid_training.model import HybridLM, Shape
    from hybrid_training.texts import (
        START_ID,
        batches,
        load_split,
        load_turns,
        prepare,
        save_turns,
    )
    from hybrid_training.training import Settings, Trainer
    from hybrid_training.writing import Script, Turn, is_held_out
finally:
    sys.path.pop(0)

KEPT = ROOT / "models" / "tales-10m"
VOCAB = 300
SHAPE = Shape(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    head_dim=16,
    linear_num_key_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=24,
    full_attention_interval=2,
    max_position_embeddings=512,
)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


def random_model() -> HybridLM:
    """Far from what training begins with."""
    torch.manual_seed(seed := random.randrange(2**31))
    print(f"seed {seed}")
    model = HybridLM(SHAPE)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn_like(weight)
            if weight.dim() == 2:
                weight.copy_(noise / 4 if "embed" in name else noise / weight.shape[1] ** 0.5)
            elif "norm" in name:
                weight.add_(0.2 * noise)
    return model


def test_the_kept_model_is_small_and_names_no_place_of_its_maker() -> None:
    assert sum(path.stat().st_size for path in KEPT.iterdir()) < 12_000_000
    for name in ("config.json", "tokenizer_config.json", "README.md"):
        assert not re.search(r"/(?:tmp|root|home|work)/", (KEPT / name).read_text())


def test_the_kept_model_drafts_in_an_engine() -> None:
    """A whole mesh compares its texts with transformers'."""
    asked = "Write a short story about a wise owl who builds a boat."
    prompt = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    ids = Tokenizer.from_file(str(KEPT / "tokenizer.json")).encode(prompt).ids
    stop = StopCriteria(max_tokens=48, ignore_eos=True)
    with LLM(
        KEPT,
        device="cpu",
        dtype="float32",
        drafter="mtp",
        draft_gate="fixed",
        max_draft_tokens=2,
        kv_memory_bytes=64 << 20,
    ) as llm:
        llm.generate([ids], stop=stop)
        counters = llm.engine.counters()
    assert counters["accepted_tokens"] > 0.3 * counters["drafted_tokens"] > 0


def test_what_is_trained_is_what_transformers_and_the_engine_compute(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    export(random_model(), tokenizer, folder := tmp_path / "model")
    model = HybridLM(SHAPE)
    load(model, folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    ours = dequantised(folder)
    left = theirs.load_state_dict(
        {name: tensor for name, tensor in ours.items() if not name.startswith("mtp.")},
        strict=False,
    )
    assert left.missing_keys in ([], ["lm_head.weight"])
    assert not left.unexpected_keys
    ids = torch.randint(3, VOCAB, (2, 128))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
        states, chain = model(ids, 2)
    found = functional.linear(states, ours["model.embed_tokens.weight"])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert [each.shape[1] for each in chain] == [127, 126]
    stop, prompts = StopCriteria(max_tokens=24, ignore_eos=True), ids[:, :40].tolist()
    with LLM(
        folder,
        device="cpu",
        dtype="float32",
        drafter="mtp",
        draft_gate="fixed",
        kv_memory_bytes=32 << 20,
    ) as llm:
        answers = [sample.token_ids for sample in llm.generate(prompts, stop=stop)]
        assert llm.engine.counters()["drafted_tokens"]
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([prompt + answer]), use_cache=False).logits[0, 39:-1]
        lacks = logits.amax(1) - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert lacks.max() <= 1e-4 * logits.abs().max()


def test_a_stopped_training_goes_on(tmp_path: Path) -> None:
    """With the weights of one that was not stopped."""
    rng = np.random.default_rng(random.randrange(2**31))
    texts = [rng.integers(3, VOCAB, rng.integers(20, 90)).astype(np.uint16) for _ in range(60)]
    settings = Settings(steps=4, batch=2, length=64, warmup_steps=2)
    start = random_model().state_dict()

    def train(name: str, fails_at: int = -1) -> Trainer:
        model = HybridLM(SHAPE)
        model.load_state_dict(start)
        trainer = Trainer(model, texts, settings, tmp_path / name, is_compiled=False)

        def checkpointed() -> dict[str, Any]:
            if trainer.step == fails_at:
                raise KeyboardInterrupt
            return {}

        trainer.run(1, 0.0, checkpointed)
        return trainer

    with pytest.raises(KeyboardInterrupt):
        train("stopped", fails_at=3)
    whole, stopped = train("whole"), train("stopped")
    for trainer in (whole, stopped):
        assert [entry["step"] for entry in trainer.log] == [1, 2, 3, 4]
    weights = stopped.model.state_dict()
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_texts_are_split_by_prompt(tmp_path: Path) -> None:
    script = Script(random.randrange(2**31))
    prompts = [script.prompt() for _ in range(300)]
    turns = [
        Turn(prompt, "Once upon a time. " * 3, bool(at % 2)) for at, prompt in enumerate(prompts)
    ]
    save_turns(tmp_path / "texts" / "turns.jsonl", turns)
    assert load_turns(tmp_path / "texts") == turns
    sizes = prepare(turns, VOCAB, tmp_path / "data")
    splits = {split: load_split(tmp_path / "data", split) for split in ("train", "held-out")}
    held = sum(map(is_held_out, prompts))
    assert len(splits["held-out"]) == held
    assert len(splits["train"]) == len(turns) - held
    for split, texts in splits.items():
        assert sum(map(len, texts)) == sizes[split]
        assert all(text[0] == START_ID for text in texts)
    rows = next(batches(splits["train"], 2, 64, 0, start=0))
    assert rows.shape == (2, 65)
    assert (rows[:, 0] == START_ID).all()
