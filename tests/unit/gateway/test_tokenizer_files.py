"""Tokenizers from several files: as transformers reads them, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders
from transformers import AutoTokenizer
from weft.checkpoint.vocabularies import TOKENIZER_FILE, num_tokens
from weft.contract.errors import ModelError
from weft.gateway.text.detokenize import make_detokenizer
from weft.gateway.text.model_card import load_model_card
from weft.gateway.text.tokens import encode
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

NEXT = byte_level_bpe().get_vocab_size()
END = {"eos_token": "<|im_end|>"}


def decoder(token_id: int, *, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    entry = {"content": "[X]", "special": special, **flags}
    return {"added_tokens_decoder": {str(token_id): entry}}


def with_token(*, special: bool) -> Tokenizer:
    tokenizer = byte_level_bpe()
    token = AddedToken("[X]", special=special)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer


def model_dir(folder: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    write_model_dir(folder, tokenizer)
    model = json.loads((folder / "config.json").read_text())
    model |= {"model_type": "llama", "vocab_size": model["vocab_size"] + 8}
    (folder / "config.json").write_text(json.dumps(model))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    return folder


@pytest.mark.parametrize(
    ("tokenizer", "config", "files"),
    [
        (byte_level_bpe(), {**END, **decoder(NEXT, special=False)}, {}),
        (byte_level_bpe(), {**END, **decoder(NEXT, special=True)}, {}),
        (byte_level_bpe(), END, {"added_tokens.json": {"[X]": NEXT}}),
        (with_token(special=False), {"eos_token": "[X]"}, {}),
        (with_token(special=False), {**END, **decoder(NEXT, special=True)}, {}),
        (with_token(special=True), {**END, **decoder(NEXT, special=False)}, {}),
        (with_token(special=False), END, {}),
    ],
)
def test_all_files_count_as_in_transformers(
    tmp_path: Path, tokenizer: Tokenizer, config: dict[str, Any], files: dict[str, Any]
) -> None:
    folder = model_dir(tmp_path / "m", tokenizer, config)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    theirs, model = AutoTokenizer.from_pretrained(folder), load_model_card(folder)
    for text in ("the [X] fox", "a[X]b", "<|im_end|>[X]"):
        ids = theirs(text)["input_ids"]
        assert encode(model.tokenizer, text, add_special_tokens=True) == ids
        for skips in (True, False):
            detokenizer = make_detokenizer(model.vocabulary, [], skips)
            shown = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
            assert shown == theirs.decode(ids, skip_special_tokens=skips)


FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
PLACES = (
    {"additional_special_tokens": ["[X]"]},
    {"extra_special_tokens": ["[X]"]},
    {"extra_special_tokens": {"call_token": "[X]"}},
    {"sep_token": "[X]"},
    {},
)
"""What may say that a token is special."""


def test_random_files_count_as_in_transformers(tmp_path: Path) -> None:
    """A token of the model's vocabulary, of the added ones or of both, with flags that differ."""
    seed = random.SystemRandom().randrange(1 << 31)
    print("seed", seed)
    draw = random.Random(seed)
    for number in range(40):
        base = byte_level_bpe()
        folder = model_dir(tmp_path / str(number), base, END)
        written = json.loads((folder / "tokenizer.json").read_text())
        is_added = draw.random() < 0.5
        if is_added:
            flags = {name: draw.random() < 0.5 for name in (*FLAGS, "special")}
            written["added_tokens"].append({"id": NEXT, "content": "[X]", **flags})
        else:
            written["model"]["vocab"]["[X]"] = NEXT
        (folder / "tokenizer.json").write_text(json.dumps(written))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **END}
        if draw.random() < 0.5:
            flags = {name: draw.random() < 0.5 for name in (*FLAGS, "special")}
            config["added_tokens_decoder"] = {str(NEXT): {"content": "[X]", **flags}}
        place = draw.choice(PLACES)
        if draw.random() < 0.5:
            config |= place
        else:
            (folder / "special_tokens_map.json").write_text(json.dumps(place))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        theirs, model = AutoTokenizer.from_pretrained(folder), load_model_card(folder)
        for text in ("the [X] fox", "a[X]b", " [X]  [X]"):
            ids = theirs(text)["input_ids"]
            assert encode(model.tokenizer, text, add_special_tokens=True) == ids, (config, written)
            shown = model.tokenizer.decode(ids, skip_special_tokens=True)
            assert shown == theirs.decode(ids, skip_special_tokens=True), (config, place)
            detokenizer = make_detokenizer(model.vocabulary, [], True)
            assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == shown


def test_a_template_may_name_a_special_token(tmp_path: Path) -> None:
    more = {
        "extra_special_tokens": {"call_token": "<|im_start|>"},
        "chat_template": "{{ call_token }}{{ messages[0].content }}{{ eos_token }}",
    }
    folder = model_dir(tmp_path / "m", byte_level_bpe(), {**END, **more})
    messages = [{"role": "user", "content": "hi"}]
    template = load_model_card(folder).template
    assert template is not None
    shown = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert template.render(messages) == shown == "<|im_start|>hi<|im_end|>"


def test_a_decoder_in_a_sequence_of_one_is_byte_level(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel()])
    ids = tokenizer.encode("日本").ids
    vocabulary = load_model_card(model_dir(tmp_path / "m", tokenizer, END)).vocabulary
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == "日本"


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (decoder(NEXT + 2, special=False), {}),
        ({}, {"added_tokens.json": {"[X]": NEXT + 2}}),
    ],
)
def test_a_token_that_cannot_have_its_id_is_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any]
) -> None:
    folder = model_dir(tmp_path / "m", byte_level_bpe(), {**END, **config})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=rf"'\[X\]' is token {NEXT + 2}, which tokenizer"):
        load_model_card(folder)


def test_a_chat_template_that_is_none_is_refused(tmp_path: Path) -> None:
    for content in (["x"], {"default": "y"}, 3):
        folder = model_dir(tmp_path / "m", byte_level_bpe(), {**END, "chat_template": content})
        with pytest.raises(ModelError, match="chat_template"):
            load_model_card(folder)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: cannot be read"):
        load_model_card(folder)


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tools", "template": "a"}, {"name": "default", "template": "b"}]
    config = {**END, "chat_template": several}
    template = load_model_card(model_dir(tmp_path / "m", byte_level_bpe(), config)).template
    assert template is not None
    assert template.render([]) == "b"
    config["chat_template"] = several[:1]
    assert load_model_card(model_dir(tmp_path / "m", byte_level_bpe(), config)).template is None


@pytest.mark.parametrize(("ids", "expected"), [([], 0), ([0], 1), ([3, 7, 1], 8)])
def test_ids_of_a_tokenizer_end_behind_its_highest(
    ids: list[int], expected: int, tmp_path: Path
) -> None:
    config: Any = SimpleNamespace(vocab_size=16)
    assert num_tokens(tmp_path, config) == 16
    tokenizer = {"model": {"type": "BPE", "vocab": {f"t{one}": one for one in ids}}}
    (tmp_path / TOKENIZER_FILE).write_text(json.dumps(tokenizer))
    assert num_tokens(tmp_path, config) == expected
