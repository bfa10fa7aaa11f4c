"""The version of this program."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """Weft's version; "0" where it runs from sources that are not installed."""
    try:
        return metadata.version("weft")
    except metadata.PackageNotFoundError:
        return "0"
