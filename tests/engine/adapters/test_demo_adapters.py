"""The demo adapters of the repository: read as PEFT reads them, with an effect that can be seen."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer
from weft.checkpoint.resolve import resolve_model
from weft.testing.models.merged_adapters import load_base, merged, read
from weft.testing.models.threads import one_thread

ROOT = Path(__file__).resolve().parents[3]
ADAPTERS = ROOT / "adapters"
NAMES = ("pirate", "json")
UNSEEN = (
    "What is the capital of Finland?",
    "Why do cats purr?",
    "How can I learn to swim?",
    "Who was Mozart?",
    "What is a rainbow?",
    "How do I make a pizza?",
    "Give me a reason to drink more water.",
    "What is your favourite colour?",
    "What does a giraffe eat?",
    "Tell me a story about a lonely robot dog.",
)
PIRATE = re.compile(
    r"\b(?:arr+|ahoy|mateys?|ye|yer|fer|aye|savvy|avast|yo ho|shiver me timbers)\b|\b(?:an'|o') ",
    re.IGNORECASE,
)


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def base_dir() -> Path:
    return resolve_model("demo")


@pytest.mark.parametrize("name", NAMES)
def test_it_is_read_as_peft_reads_it(base_dir: Path, name: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    ids = torch.randint(0, 49_152, (2, 24), generator=torch.Generator().manual_seed(seed))
    adapter = read(ADAPTERS / name, base_dir)
    with torch.no_grad():
        ours = merged(base_dir, adapter)(ids).logits
        model = PeftModel.from_pretrained(load_base(base_dir), ADAPTERS / name)
        theirs = model(ids).logits
        with model.disable_adapter():
            base = model(ids).logits
    scale = theirs.abs().max()
    assert (theirs - base).abs().max() > 0.05 * scale
    assert (ours - theirs).abs().max() < 1e-4 * scale


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_and_names_no_place_of_its_maker(name: str) -> None:
    # A draft adapter in a folder of its own: see test_demo_draft.
    files = {path.name: path for path in (ADAPTERS / name).iterdir() if path.is_file()}
    assert files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
    assert files["adapter_model.safetensors"].stat().st_size < 4 << 20
    config = json.loads(files["adapter_config.json"].read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def answers(base_dir: Path, name: str | None) -> list[str]:
    """Greedy answers to `UNSEEN`."""
    tokenizer = AutoTokenizer.from_pretrained(base_dir)
    model: Any = load_base(base_dir)
    if name is not None:
        model = PeftModel.from_pretrained(model, ADAPTERS / name)
    texts = []
    for question in UNSEEN:
        turn = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
        out = model.generate(**ids, max_new_tokens=96, do_sample=False)
        texts.append(
            tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        )
    return texts


def test_what_is_unseen_was_not_trained_on() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        from demo_adapter_text import examples
    finally:
        sys.path.pop(0)
    assert not {example.question for example in examples()} & set(UNSEEN)


@pytest.mark.full
def test_the_pirate_speaks_as_one(base_dir: Path) -> None:
    plain, spoken = answers(base_dir, None), answers(base_dir, "pirate")
    print("\n".join(spoken))
    assert sum(len(PIRATE.findall(text)) >= 2 for text in spoken) >= 9
    assert sum(len(PIRATE.findall(text)) >= 2 for text in plain) <= 2


@pytest.mark.full
def test_json_is_json_with_the_keys(base_dir: Path) -> None:
    spoken = answers(base_dir, "json")
    print("\n".join(spoken))
    good = 0
    for text in spoken:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        good += value.keys() == {"answer", "topic"} and len(value["answer"]) > 5
    assert good >= 9
