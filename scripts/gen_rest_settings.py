"""Writes the REST edge's settings for its Go sources, which embed them and make flags of them."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo
from weft.cli.rest_settings import RestSettings

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "services" / "rest" / "cmd" / "weft-rest" / "settings.json"


def text() -> str:
    """The file's text: name, default, bounds and words of each setting."""
    entries = [_entry(name, field) for name, field in RestSettings.model_fields.items()]
    return json.dumps(entries, indent=2) + "\n"


def _entry(name: str, field: FieldInfo) -> dict[str, Any]:
    bounds: dict[str, Any] = {}
    for bound in field.metadata:
        if isinstance(bound, Ge):
            bounds["min"] = _value(bound.ge)
        elif isinstance(bound, Le):
            bounds["max"] = _value(bound.le)
    default = "" if field.default is None else field.default
    return {
        "name": name.replace("_", "-"),
        "default": _value(default),
        **bounds,
        "help": field.description,
    }


def _value(value: Any) -> Any:
    """A duration is a number of seconds."""
    return value.total_seconds() if isinstance(value, timedelta) else value


if __name__ == "__main__":
    TARGET.write_text(text())
