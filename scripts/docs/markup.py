"""Text of comments and docstrings as Markdown."""

from __future__ import annotations

import re


def inline(text: str) -> str:
    """A docstring's text in one line, without what Markdown would read as its own."""
    return escape(" ".join(text.split()))


def escape(text: str) -> str:
    """Text in which only code spans are marked up."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<>\[\]{}|\\$#])", r"\\\1", part)
        for part in parts
    )
