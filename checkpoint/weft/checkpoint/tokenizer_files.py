"""Reads a model's tokenizer from all of its files, by one rule for engine and gateway."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer
from weft.contract.errors import ModelError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")
_ROLES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_MORE_SPECIAL = ("additional_special_tokens", "extra_special_tokens")
"""Fields that list special tokens; transformers 5 may write the second as an object by name."""


class TokenizerFiles(NamedTuple):
    tokenizer: Tokenizer
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    special_tokens: dict[str, str]
    """Texts of the special tokens that have names, such as `eos_token`."""


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Reads a JSON object; returns an empty one if the file is missing and not required."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if required:
            raise ModelError(f"{path}: missing; --model-dir takes a Hugging Face model") from None
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: a JSON object is expected")
    return content


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """The tokenizer of tokenizer.json with the additions of transformers: tokens that only other
    files name, and the marks of special tokens. Raises ModelError if there is no tokenizer.json, or
    a token cannot have the id that a file gives it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing; a model with a fast tokenizer is needed")
    config = read_json(folder / "tokenizer_config.json")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for token_id, (token, where) in sorted(_added_tokens(folder, config).items()):
        _add(tokenizer, token_id, token, where)
    # As in transformers: if the config lists added tokens, special_tokens_map.json is ignored.
    is_whole = isinstance(config.get("added_tokens_decoder"), dict)
    older = {} if is_whole else read_json(folder / "special_tokens_map.json")
    fields = {**older, **config}
    names = {name: _as_token(value) for name, value in _named(fields).items()}
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token in names.values():
        _make_special(tokenizer, added.get(token.content, token))
    for token in _unnamed(fields):
        if token.content not in added:
            _make_special(tokenizer, token)
    texts = {name: token.content for name, token in names.items()}
    return TokenizerFiles(tokenizer, config, texts)


def decoder_types(tokenizer: Tokenizer) -> list[str]:
    """Types of the tokenizer's decoders, in order."""
    decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
    parts = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [str(part.get("type")) for part in parts]


def _make_special(tokenizer: Tokenizer, token: AddedToken) -> None:
    if tokenizer.token_to_id(token.content) is not None:
        token.special = True
        tokenizer.add_special_tokens([token])


def _named(fields: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: fields.get(name) for name in _ROLES}
    more = fields.get(_MORE_SPECIAL[1])
    if isinstance(more, dict):
        found |= more
    return {name: value for name, value in found.items() if _is_token(value)}


def _unnamed(fields: Mapping[str, Any]) -> Iterator[AddedToken]:
    for field in _MORE_SPECIAL:
        listed = fields.get(field)
        if isinstance(listed, list):
            yield from map(_as_token, filter(_is_token, listed))


def _is_token(value: object) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    return isinstance(text, str) and bool(text)


def _as_token(value: Any) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    return _token(value, special=True)


def _token(entry: Mapping[str, Any], *, special: bool) -> AddedToken:
    flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
    return AddedToken(entry["content"], special=special, **flags)


def _added_tokens(
    folder: Path, tokenizer_config: Mapping[str, Any]
) -> dict[int, tuple[AddedToken, str]]:
    """Tokens by id, each with the file that names it."""
    listed = tokenizer_config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        older = read_json(folder / "added_tokens.json").items()
        return {
            token_id: (AddedToken(content, normalized=False), "added_tokens.json")
            for content, token_id in older
            if isinstance(token_id, int)
        }
    found: dict[int, tuple[AddedToken, str]] = {}
    for text, entry in listed.items():
        if text.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            token = _token(entry, special=bool(entry.get("special")))
            found[int(text)] = token, "tokenizer_config.json"
    return found


def _add(tokenizer: Tokenizer, token_id: int, token: AddedToken, where: str) -> None:
    if tokenizer.token_to_id(token.content) is None and token_id != tokenizer.get_vocab_size():
        raise ModelError(
            f"{where}: {token.content!r} is token {token_id}, which tokenizer.json lacks, with "
            f"{tokenizer.get_vocab_size()} tokens: add it there"
        )
    known = tokenizer.get_added_tokens_decoder().get(token_id)
    if token.special or (known is not None and known.special):
        token.special = True
        tokenizer.add_special_tokens([token])
    else:
        tokenizer.add_tokens([token])
