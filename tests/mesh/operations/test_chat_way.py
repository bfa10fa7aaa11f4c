"""The way of one chat through the product's files grows only on purpose."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]
ROOT = Path(__file__).parents[3]
MOST_FILES = {"gateway": 54, "decode server": 12, "engine": 63}
"""Some above what there is: which checks run depends on the machine and on times."""


def test_a_chat_passes_no_more_files(rest_binary: Path) -> None:
    command = [sys.executable, str(ROOT / "bench" / "chat_way.py")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240).stdout
    found = {name: int(count) for name, count in re.findall(r"^(.+): (\d+) files, ", told, re.M)}
    assert found.keys() == MOST_FILES.keys(), told
    assert {name for name in found if found[name] > MOST_FILES[name]} == set(), told
