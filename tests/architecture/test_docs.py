"""What the documents show is what the programs say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for pattern in ("*.md", "*/README.md", "docs/*.md", "docs/decisions/*.md", "services/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]


def messages(situation: str) -> list[str]:
    """What docs/operations.md says that is said then."""
    text = (ROOT / "docs" / "operations.md").read_text()
    rows = re.findall(rf"^\| {re.escape(situation)} \| `(.+)` \|$", text, re.MULTILINE)
    assert rows, situation
    return rows


@pytest.mark.parametrize(
    ("situation", "flags", "environment"),
    [
        ("wrong value", ["--grpc-port", "99999"], {}),
        ("wrong value in the environment", [], {"WEFT_UP_REST_PORT": "abc"}),
    ],
)
def test_refused_settings_are_as_documented(
    situation: str, flags: list[str], environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft.cli", "up", *flags],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    for message in messages(situation):
        assert message in done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_whole(page: Path) -> None:
    """A row after an empty line is shown as text unless a head and its rule come with it."""
    lines = page.read_text().splitlines()
    for number in range(1, len(lines) - 1):
        if lines[number].startswith("|") and not lines[number - 1].startswith("|"):
            assert re.match(r"\|[ :|-]+\|$", lines[number + 1]), f"{page.name}:{number + 1}"


def test_the_edge_has_the_flags_that_its_page_names() -> None:
    page = (ROOT / "services" / "rest" / "README.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "services/rest/cmd").rglob("*.go"))
    for flag in set(re.findall(r"`--([a-z-]+)`", page)):
        assert f'"{flag}"' in sources, flag
    assert "--https-cert" in page
