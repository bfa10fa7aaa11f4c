"""A model's tokenizer, from all files that have a part in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from weft.engine.errors import ModelError

_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    """Reads a JSON object; an empty one if it is not there and not required.

    Raises:
        ModelError: It is missing, or no such file.
    """
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


def read_tokenizer(
    folder: Path, tokenizer_config: Mapping[str, Any], specials: Mapping[str, str]
) -> Tokenizer:
    """The tokenizer of tokenizer.json with what transformers adds to it: tokens that only the files
    beside it name, and which tokens are special.

    Args:
        folder: The model's.
        tokenizer_config: Content of tokenizer_config.json.
        specials: Texts of the special tokens by role, such as `eos_token`.

    Raises:
        ModelError: There is no tokenizer.json, or a token cannot have the id that a file gives it.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path}: missing; a model with a fast tokenizer is needed")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ModelError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for token_id, (token, where) in sorted(_added_tokens(folder, tokenizer_config).items()):
        _add(tokenizer, token_id, token, where)
    known = [text for text in specials.values() if tokenizer.token_to_id(text) is not None]
    added = tokenizer.get_added_tokens_decoder().values()
    already = {token.content for token in added if token.special}
    tokenizer.add_special_tokens([text for text in known if text not in already])
    return tokenizer


def _added_tokens(
    folder: Path, tokenizer_config: Mapping[str, Any]
) -> dict[int, tuple[AddedToken, str]]:
    """Tokens by id, and the file that names each."""
    found: dict[int, tuple[AddedToken, str]] = {}
    for content, token_id in read_json(folder / "added_tokens.json").items():
        if isinstance(token_id, int):
            found[token_id] = AddedToken(content, normalized=False), "added_tokens.json"
    listed = tokenizer_config.get("added_tokens_decoder")
    for text, entry in listed.items() if isinstance(listed, dict) else ():
        if text.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            flags = {name: bool(entry[name]) for name in _FLAGS if name in entry}
            token = AddedToken(entry["content"], special=bool(entry.get("special")), **flags)
            found[int(text)] = token, "tokenizer_config.json"
    return found


def _add(tokenizer: Tokenizer, token_id: int, token: AddedToken, where: str) -> None:
    known_id = tokenizer.token_to_id(token.content)
    if known_id is None and token_id != tokenizer.get_vocab_size():
        raise ModelError(
            f"{where}: {token.content!r} is token {token_id}, which tokenizer.json lacks, with "
            f"{tokenizer.get_vocab_size()} tokens: add it there"
        )
    if known_id is None and not token.special:
        tokenizer.add_tokens([token])
    elif token.special and not _is_special(tokenizer, token_id):
        tokenizer.add_special_tokens([token])


def _is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    known = tokenizer.get_added_tokens_decoder().get(token_id)
    return known is not None and known.special
