"""Locates the binary of the Go REST edge."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

NAME = "weft-rest"


def find_rest_binary() -> Path | None:
    """The `weft-rest` of this source tree, else that of the installed wheel, else the one on the
    PATH, else None.
    """
    # cli/weft/cli/rest_binary.py of a checkout; elsewhere this folder does not exist.
    built = Path(__file__).resolve().parents[3] / "services" / "rest" / "bin" / NAME
    installed = Path(sysconfig.get_path("scripts")) / NAME
    for path in (built, installed):
        if path.is_file():
            return path
    found = shutil.which(NAME)
    return Path(found) if found else None
