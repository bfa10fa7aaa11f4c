"""Patterns of modules' names in a quantization_config."""

from __future__ import annotations

import re

from weft.checkpoint.fields import Fields

_WRAPPED = ".linear"
"""Suffix that llm-compressor adds to the name of a module that it wraps."""


def names_in(section: Fields, field: str) -> tuple[str, ...]:
    """A list of names; each may be `re:` followed by a regular expression."""
    names = section.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise section.error(field, f"expected a list of names, got {names!r}")
    for name in names:
        if name.startswith("re:"):
            try:
                re.compile(name[3:])
            except re.error as error:
                raise section.error(field, f"{name!r}: {error}") from error
    return tuple(names)


def anywhere(name: str) -> str:
    """A pattern of all modules that have this name, end with it, or lie below such a module."""
    return rf"re:(?:.*\.)?{re.escape(name)}(?:\..*)?$"


def matches(pattern: str, module: str) -> bool:
    """Whether a full name equals the pattern, or its beginning matches a pattern `re:...`."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return module in (pattern, pattern.removesuffix(_WRAPPED))
