"""End-of-text token ids of a model: one rule for engine and gateway. Pure Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.contract.errors import ModelError

_FIELD = "eos_token_id"


def end_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], where: str = ""
) -> tuple[int, ...]:
    """The end tokens of generation_config.json, whose content is empty if it does not exist; else
    those of config.json; else none. `where` names their directory in messages.

    `transformers` does the same, except that it ignores config.json if there is a
    generation_config.json, even if that names no end tokens.
    """
    for file, source in (("generation_config.json", generation), ("config.json", config)):
        value = source.get(_FIELD)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            place = f"{where}/{file}" if where else file
            raise ModelError(f"{place}: {_FIELD}: expected token ids, got {value!r}", param=_FIELD)
        if ids:
            return tuple(dict.fromkeys(ids))
    return ()


def tokenizer_end_token(folder: Path) -> tuple[int, ...]:
    """The id of the tokenizer's `eos_token`, for models whose files name no end tokens. `folder`
    has tokenizer.json, and tokenizer_config.json or special_tokens_map.json. Empty if the files are
    missing or malformed, or name no `eos_token`.
    """
    name = None
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        token = _read(folder / file).get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        name = token if isinstance(token, str) else name
    if name is None:
        return ()
    tokenizer = _read(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or ():
        if isinstance(added, dict) and added.get("content") == name:
            return (added["id"],) if isinstance(added.get("id"), int) else ()
    model = tokenizer.get("model")
    entries = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(entries, list):  # unigram models list pairs of token and score
        entries = {entry[0]: index for index, entry in enumerate(entries)}
    found = entries.get(name) if isinstance(entries, dict) else None
    return (found,) if isinstance(found, int) else ()


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
