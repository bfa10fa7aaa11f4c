"""Typed reading of JSON objects; every error names the field and its file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from weft.contract.errors import ModelError

_SHOWN_CHARS = 80


class Fields:
    """A JSON object whose fields are read with a type and an optional default.

    A field that is null counts as absent, as Hugging Face configurations use it.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._where = where

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def error(self, name: str, problem: str) -> ModelError:
        return ModelError(f"{self._where}: {name}: {problem}", param=name)

    def replaced(self, **values: Any) -> Fields:
        """A copy with some fields replaced or added."""
        return Fields({**self._values, **values}, self._where)

    def equals(self, other: Fields, *, but: str) -> bool:
        """Whether all fields except `but` have the values of another object's."""
        own, others = ({**part._values, but: None} for part in (self, other))
        return own == others

    def only(self, name: str, value: object) -> None:
        """Raises ModelError unless a field is absent or has the one value that is supported."""
        if self.get(name) not in (None, value):
            raise self.error(name, f"only {value!r} is supported, not {self.get(name)!r}")

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"expected a positive whole number, got {value!r}")
        return value

    def count(self, name: str, default: int) -> int:
        """A whole number of at least 0."""
        value = self._required(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(name, f"expected a whole number from 0, got {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number greater than zero."""
        value = self._required(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 < value <= sys.float_info.max:
            shown = repr(value)[:_SHOWN_CHARS]
            raise self.error(name, f"expected a number greater than zero, got {shown}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._required(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._required(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"expected a string, got {value!r}")
        return value

    def section(self, name: str) -> Fields:
        """A nested object; empty if absent."""
        value = self._required(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"expected an object, got {value!r}")
        return Fields(value, f"{self._where}: {name}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty if absent."""
        return self._numbers(name, "token ids")

    def indices(self, name: str) -> tuple[int, ...]:
        """Numbers from 0; empty if absent."""
        return self._numbers(name, "numbers from 0")

    def _numbers(self, name: str, what: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
            raise self.error(name, f"expected {what}, got {value!r}")
        return tuple(ids)

    def _required(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error


def read_json_file(path: Path, *, may_lack: bool = False) -> Mapping[str, Any]:
    """Reads a JSON object from a file. `may_lack`: no file counts as an empty object."""
    if may_lack and not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return content


def fields_of_file(path: Path, *, may_lack: bool = False) -> Fields:
    """As `read_json_file`."""
    return Fields(read_json_file(path, may_lack=may_lack), str(path))
