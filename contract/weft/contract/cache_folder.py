"""The cache folder of a host: compiled libraries, converted models; deleting it loses only time."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Folder for files made on this machine.

    `$WEFT_CACHE_DIR`, else `$XDG_CACHE_HOME/weft`, else `~/.cache/weft`. Raises RuntimeError if
    none of them is set and the user has no home folder.
    """
    if explicit := os.environ.get("WEFT_CACHE_DIR"):
        return Path(explicit)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "weft"
    return Path.home() / ".cache" / "weft"
