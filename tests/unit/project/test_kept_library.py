"""The chart library that the console keeps is the one that its note names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KEPT = ROOT / "services" / "rest" / "internal" / "console" / "static" / "vendor"


def test_the_kept_files_are_those_of_the_note() -> None:
    told = dict(
        reversed(pair)
        for pair in re.findall(r"^([0-9a-f]{64})  (\S+)$", (KEPT / "uPlot.txt").read_text(), re.M)
    )
    kept = {path.name for path in KEPT.iterdir()} - {"uPlot.txt", "uPlot.LICENSE"}
    assert told.keys() == kept
    for name, digest in told.items():
        assert hashlib.sha256((KEPT / name).read_bytes()).hexdigest() == digest
