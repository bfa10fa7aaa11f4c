"""End-of-text token ids of a model: one rule for engine and gateway. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.engine.errors import ModelError

_FIELD = "eos_token_id"


def end_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], where: str = ""
) -> tuple[int, ...]:
    """The end tokens that generation_config.json names; else those of config.json; else none.

    So does `transformers`, but that it takes nothing from config.json when there is a
    generation_config.json without any.

    Args:
        config: Content of config.json.
        generation: Content of generation_config.json; empty if there is none.
        where: Directory of both, for messages.

    Raises:
        ModelError: The ends are no token ids.
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
