"""Decides whether a pattern of `patternProperties` matches names beyond those of `properties`."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def has_names(pattern: str, *, but: Iterable[str]) -> bool:
    """Whether a pattern, as llguidance spells it, matches any name except those of `but`.

    llguidance excludes the names of listed properties from a pattern. If no name remains, it still
    lets a text begin one more property, and then nothing can follow.
    """
    # Imported here, as below: reading a schema needs no llguidance.
    from llguidance import LLMatcher

    schema = {
        "type": "object",
        "properties": dict.fromkeys(but, False),
        "patternProperties": {pattern: {"type": "null"}},
        "additionalProperties": False,
        "minProperties": 1,
        "x-guidance": {"whitespace_flexible": False},
    }
    matcher = LLMatcher(_one_byte_tokens(), f"start: %json {json.dumps(schema)}", log_level=0)
    if matcher.is_error() or not matcher.consume_token(ord("{")):
        return True  # Compiling the whole schema reports the error.
    matcher.compute_bitmask()
    return not matcher.is_error()


NOTHING = re.compile("(?i)unsatisfiable|NoExtension|regex is empty")
"""What llguidance's errors say where no text satisfies a schema."""


@functools.lru_cache(maxsize=4096)
def have_match_in_common(first: str, second: str) -> bool:
    """Whether some string matches two patterns, as llguidance spells them."""
    from llguidance import LLMatcher

    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in (first, second)]}
    matcher = LLMatcher(_one_byte_tokens(), f"start: %json {json.dumps(schema)}", log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return not matcher.is_error() or not NOTHING.search(matcher.get_error())


@functools.cache
def _one_byte_tokens() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer("byte")
