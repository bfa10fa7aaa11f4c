"""Which tokens end a text, where a model's files disagree: engine, gateway and transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import ModelError
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.gateway.text.model_card import load_model_card
from weft.testing.models.tiny_models import make_tiny

LENGTH = 48
# Ends of config.json and of generation_config.json: numbers of the token in the free text that is
# named there, from the first; None: the file is silent; "no file".
CASES = [
    (6, 12),
    (12, 6),
    (6, [12, 20]),
    ([6, 20], [20, 12]),
    (6, "no file"),
    (None, 12),
    (None, None),
]


def write(path: Path, named: list[int], config_end: Any, generation_end: Any) -> None:
    """Puts the ends of a case into a model's files."""

    def ids(end: Any) -> Any:
        return [named[i] for i in end] if isinstance(end, list) else end and named[end]

    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "eos_token_id": ids(config_end)}))
    generation = path / "generation_config.json"
    generation.unlink(missing_ok=True)
    if generation_end != "no file":
        end = {} if generation_end is None else {"eos_token_id": ids(generation_end)}
        generation.write_text(json.dumps({"bos_token_id": 1, "pad_token_id": 0, **end}))


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("ends") / "model", seed=5, tokenizer=True)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(3, 500) for _ in range(20)]


def ours(path: Path, prompt: list[int], **stop: Any) -> list[int]:
    with LLM(path, dtype="float32", num_pages=64, num_threads=1) as llm:
        (sample,) = llm.generate(
            [prompt], SamplingParams(temperature=0.0), StopCriteria(max_tokens=LENGTH, **stop)
        )
    return sample.token_ids


def theirs(path: Path, prompt: list[int]) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = torch.tensor([prompt])
    out = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=LENGTH, do_sample=False
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def named(model_dir: Path, prompt: list[int]) -> list[int]:
    """The different tokens of the text without an end, in the order of their first places."""
    return list(dict.fromkeys(ours(model_dir, prompt, ignore_eos=True)))


@pytest.mark.parametrize(("config_end", "generation_end"), CASES)
def test_texts_end_where_transformers_ends_them(
    model_dir: Path, prompt: list[int], named: list[int], config_end: Any, generation_end: Any
) -> None:
    write(model_dir, named, config_end, generation_end)
    expected = theirs(model_dir, prompt)
    assert ours(model_dir, prompt) == expected
    assert (len(expected) < LENGTH) == bool(config_end or generation_end)


# Where no file names one, the gateway asks its tokenizer as well.
@pytest.mark.parametrize(("config_end", "generation_end"), [*CASES[:-1], ([12, 6], None)])
def test_engine_and_gateway_read_the_same(
    model_dir: Path, named: list[int], config_end: Any, generation_end: Any
) -> None:
    write(model_dir, named, config_end, generation_end)
    ends = set(ModelConfig.load(model_dir).eos_token_ids)
    named_end = config_end if generation_end in (None, "no file") else generation_end
    expected = [named_end] if isinstance(named_end, int) else named_end or []
    assert ends == load_model_card(model_dir).eos_ids == {named[i] for i in expected}


@pytest.mark.parametrize("end", ["2", [2, "3"], True, -1, {"id": 2}])
def test_ends_that_are_no_ids_are_refused_by_both(
    model_dir: Path, named: list[int], end: Any
) -> None:
    write(model_dir, named, 6, 12)
    generation = model_dir / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": end}))
    for load in (ModelConfig.load, load_model_card):
        with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id"):
            load(model_dir)
