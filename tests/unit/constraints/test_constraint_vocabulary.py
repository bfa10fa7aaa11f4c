"""What tokens spell for grammars: what the gateway shows of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from weft.checkpoint.tokenizer_files import read_tokenizer
from weft.engine.features.constraints.vocabulary import load_vocabulary, token_bytes
from weft.gateway.text.detokenize import Vocabulary
from weft.gateway.text.model_card import load_model_card
from weft.testing.models.tiny_tokenizers import byte_level_bpe, write_model_dir

WORDS = ["<unk>", "\u2581", "\u2581yes", "\u2581sir", "sir", *"nosir"]


def metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<|im_end|>"])
    return tokenizer


def spelled(folder: Path, size: int) -> list[bytes]:
    loaded = load_vocabulary(folder, size, (0,))
    assert (loaded.vocab_size, loaded.eos_tokens) == (size, [0])
    return token_bytes(read_tokenizer(folder).tokenizer, size)


@pytest.mark.parametrize("make", [byte_level_bpe, metaspace])
def test_tokens_spell_what_is_shown(tmp_path: Path, make: object) -> None:
    assert callable(make)
    tokenizer = make()
    folder = write_model_dir(tmp_path / "m", tokenizer)
    vocabulary, size = Vocabulary(tokenizer), tokenizer.get_vocab_size()
    shown = [
        b"" if id_ in vocabulary.special_ids else vocabulary.token_bytes(id_) for id_ in range(size)
    ]
    assert spelled(folder, size) == shown
    # A model may have more ids than its tokenizer.
    assert spelled(folder, size + 9) == shown + [b""] * 9


def test_a_token_that_another_file_makes_special_spells_nothing(tmp_path: Path) -> None:
    tokenizer = byte_level_bpe()
    tokenizer.add_tokens([AddedToken("<sep>", special=False)])
    folder = write_model_dir(tmp_path / "m", tokenizer)
    token_id, size = tokenizer.token_to_id("<sep>"), tokenizer.get_vocab_size()
    assert spelled(folder, size)[token_id] == b"<sep>"
    config = {"eos_token": "<|im_end|>", "sep_token": "<sep>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert token_id in load_model_card(folder).vocabulary.special_ids
    assert spelled(folder, size)[token_id] == b""
