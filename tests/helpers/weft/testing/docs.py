"""The repository's pages: their words, links, and blocks of commands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[4]
HOWTO = ROOT / "docs" / "howto"
_BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- (?P<mark>[a-z]+)(?:: [^>]*)? -->\n(?P=indent))?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^()\s]+)\)")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    mark: str
    """Word of the comment above it: `run`, `up`, `shown`; empty without one."""
    language: str
    """What the fence says; empty where it says nothing."""
    text: str
    """Its lines, without the indentation of the list that it stands in."""


def pages() -> list[Path]:
    """All pages of the repository, the README first."""
    patterns = ("*.md", "*/README.md", "docs/**/*.md", "services/*/*.md", "bench/notes/*.md")
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    found += sorted(ROOT.glob("drafts/*/README.md"))
    own = [path for path in found if path.relative_to(ROOT).parts[:2] != ("docs", "reference")]
    return list(dict.fromkeys(path for path in own if not path.parts[-2].startswith(".")))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    for match in _BLOCK.finditer(page.read_text()):
        indent = match["indent"]
        lines = [line.removeprefix(indent) for line in match["text"].splitlines()]
        yield Block(page, match["mark"] or "", match["language"], "\n".join(lines) + "\n")


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _BLOCK.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, as written."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    found = set()
    for line in prose(page).splitlines():
        if line.startswith("#"):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip())
            kept = re.sub(r"[^\w\- ]", "", title.lower())
            found.add(kept.replace(" ", "-"))
    return found


def num_words(page: Path) -> int:
    """Words of a page: what stands between spaces and has a letter or a digit."""
    return sum(bool(re.search(r"[^\W_]", word)) for word in page.read_text().split())
