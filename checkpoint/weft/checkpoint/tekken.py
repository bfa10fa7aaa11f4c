"""Makes tokenizer.json of a tekken.json, Mistral's file of a vocabulary in tiktoken's form. Pure
Python.

Within a piece of text, tiktoken merges the two neighbours whose concatenation has the lowest rank,
leftmost first, until no concatenation is a token. A token that can result from this results from
exactly one pair: all earlier merges lie within its own bytes, and are the same wherever these bytes
occur. So a list with this one pair for each token, in the order of ranks, makes the BPE of
`tokenizers` compute the same tokens.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.checkpoint.byte_pairs import byte_letters, byte_pair_tokenizer
from weft.checkpoint.fields import Fields, fields_of_file

TEKKEN_FILE = "tekken.json"
_DEFAULT_SPECIAL = ("<unk>", "<s>", "</s>")
_BEGIN, _END = "<s>", "</s>"
_NUM_SPECIAL = 1000


def tekken_files(path: Path) -> dict[str, Mapping[str, Any]]:
    """Contents of tokenizer.json and tokenizer_config.json."""
    fields = fields_of_file(path)
    config = fields.section("config")
    num_special = config.positive("default_num_special_tokens", _NUM_SPECIAL)
    special = _special_tokens(fields, num_special)
    count = config.positive("default_vocab_size") - num_special
    tokens = _tokens(fields, count)
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if len(ranks) != len(tokens):
        raise fields.error("vocab", "a token is there twice")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise fields.error("vocab", "expected a token for each byte")
    letters = byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    vocabulary = {content: number for number, content in enumerate(special)}
    vocabulary |= {text(token): num_special + rank for rank, token in enumerate(tokens)}
    if len(vocabulary) != num_special + len(tokens):
        raise fields.error("special_tokens", "the name of one is a token of text")
    merges = [pair for token in tokens if (pair := last_merge(token, ranks)) is not None]
    levels = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pattern = config.text("pattern", "")
    tokenizer = byte_pair_tokenizer(
        vocabulary,
        [[text(first), text(second)] for first, second in merges],
        enumerate(special),
        pre_tokenizer={
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": pattern},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", **levels},
            ],
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [_mark(_BEGIN), _sequence("A")],
            "pair": [_mark(_BEGIN), _sequence("A"), _sequence("B")],
            "special_tokens": {
                _BEGIN: {"id": _BEGIN, "ids": [special.index(_BEGIN)], "tokens": [_BEGIN]}
            },
        },
        decoder={"type": "ByteLevel", **levels},
        ignores_merges=True,
    )
    named = {"bos_token": _BEGIN, "eos_token": _END, "unk_token": special[0]}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": named}


def last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    parts = [token[place : place + 1] for place in range(len(token))]
    while len(parts) > 1:
        pairs = [first + second for first, second in itertools.pairwise(parts)]
        found = [(ranks[pair], place) for place, pair in enumerate(pairs) if pair in ranks]
        if not found:
            return None
        if len(parts) == 2:
            return parts[0], parts[1]
        place = min(found)[1]
        parts[place : place + 2] = [pairs[place]]
    return None


def _special_tokens(fields: Fields, count: int) -> list[str]:
    """The special tokens, which have the first ids; tokens without a name get one."""
    listed = fields.get("special_tokens")
    if listed is None:
        listed = [{"token_str": text} for text in _DEFAULT_SPECIAL]
    try:
        names = [str(entry["token_str"]) for entry in listed]
    except (TypeError, KeyError) as error:
        raise fields.error("special_tokens", f"not a list of tokens: {error!r}") from error
    names += [f"<SPECIAL_{number}>" for number in range(len(names), count)]
    if len(names) != count or len(set(names)) != count or _BEGIN not in names:
        raise fields.error("special_tokens", f"expected {count} names, {_BEGIN} among them")
    return names


def _tokens(fields: Fields, count: int) -> list[bytes]:
    listed = fields.get("vocab")
    try:
        found = [base64.b64decode(entry["token_bytes"], validate=True) for entry in listed[:count]]
        is_ordered = all(entry["rank"] == rank for rank, entry in enumerate(listed[:count]))
    except (TypeError, KeyError, binascii.Error) as error:
        raise fields.error("vocab", f"not a list of tokens: {error!r}") from error
    if len(found) != count or not is_ordered or not all(found):
        raise fields.error("vocab", f"expected {count} tokens in the order of their ranks")
    return found


def _mark(token: str) -> Mapping[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _sequence(name: str) -> Mapping[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}
