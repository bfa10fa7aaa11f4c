"""Optional features of the engine are named in few files outside their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("engine", "services", "cli")


@pytest.mark.parametrize(
    ("words", "own", "most"),
    [
        ("draft", r"/(speculative|drafts|heads)/|eagle|chains", 60),
        ("adapter|lora", r"adapter|lora", 103),
        ("constraint|grammar", r"constrain", 43),
    ],
)
def test_few_files_name_a_guest_that_is_not_theirs(words: str, own: str, most: int) -> None:
    """The same count as in bench/notes/structure.md."""
    files = (path for part in PARTS for path in sorted((ROOT / part).rglob("*.py")))
    named = [
        name
        for path in files
        if not re.search(f"{own}|settings|config", name := str(path.relative_to(ROOT)))
        if re.search(words, path.read_text(), re.IGNORECASE)
    ]
    assert len(named) <= most, f"{len(named)} files name {words}: {', '.join(named)}"


def test_few_files_name_a_sampling_parameter() -> None:
    """It is declared once. Besides, the sampler defines it, and each form computes it."""
    parts = (*PARTS, "kernels", "contract", "pages", "checkpoint")
    files = (path for part in parts for path in sorted((ROOT / part).rglob("*.py")))
    named = [
        str(path.relative_to(ROOT)) for path in files if re.search(r"\bmin_p\b", path.read_text())
    ]
    assert len(named) <= 5, named
