"""Locates the binary of the Go REST edge."""

from __future__ import annotations

import shutil
from pathlib import Path

NAME = "weft-rest"


def find_rest_binary() -> Path | None:
    """The `weft-rest` of this source tree, else the one on the PATH, else None."""
    # cli/weft/cli/rest_binary.py of a checkout; elsewhere this folder does not exist.
    built = Path(__file__).resolve().parents[3] / "services" / "rest" / "bin" / NAME
    if built.is_file():
        return built
    found = shutil.which(NAME)
    return Path(found) if found else None
