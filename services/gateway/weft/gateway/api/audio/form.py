"""Parses bodies of the type multipart/form-data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.contract.errors import InvalidRequest

_BOUNDARY = re.compile(rb"--([0-9A-Za-z'()+_,./:=? -]{1,70})\r\n")
_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 1 << 20


@dataclass(slots=True)
class Form:
    """The fields of a form."""

    texts: dict[str, list[str]] = field(default_factory=dict)
    """Values of fields, in order, by name; `[]` at a name's end is left out."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Contents of files by the names of their fields."""

    def one(self, name: str) -> str | None:
        """The last value of a field; None: it has none."""
        return self.texts[name][-1] if name in self.texts else None


class _Parts:
    """Collects parts as the parser finds them."""

    def __init__(self) -> None:
        self.form = Form()
        self._header, self._value = b"", b""
        self._headers: dict[bytes, bytes] = {}
        self._data = bytearray()
        self._num_parts = 0

    def callbacks(self) -> Mapping[str, object]:
        names = ("part_begin", "part_data", "part_end", "header_field", "header_value")
        calls = {f"on_{name}": getattr(self, name) for name in (*names, "header_end")}
        return calls

    def part_begin(self) -> None:
        self._headers, self._data = {}, bytearray()
        self._num_parts += 1
        if self._num_parts > _MAX_FIELDS:
            raise _malformed(f"has more than {_MAX_FIELDS} parts")

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def part_data(self, data: bytes, start: int, end: int) -> None:
        self._data += data[start:end]

    def part_end(self) -> None:
        from python_multipart.multipart import parse_options_header

        kind, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if kind != b"form-data" or not name:
            raise _malformed("has a part without a name")
        if b"filename" in options or name == "file":
            self.form.files[name] = bytes(self._data)
            return
        if len(self._data) > _MAX_FIELD_BYTES:
            raise _malformed(f"has a field of {len(self._data)} bytes")
        try:
            text = self._data.decode()
        except UnicodeDecodeError:
            raise _malformed("has a field that is not UTF-8") from None
        self.form.texts.setdefault(name.removesuffix("[]"), []).append(text)


def parse_form(data: bytes) -> Form:
    """The parts of a body, which begins with the line that separates them. Raises InvalidRequest if
    it is malformed.
    """
    # Only here: gateways of other models start without.
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    found = _BOUNDARY.match(data)
    if found is None:
        raise _malformed("does not begin with a boundary")
    parts = _Parts()
    parser = MultipartParser(found[1], parts.callbacks())  # type: ignore[arg-type]
    try:
        parser.write(data)
        parser.finalize()
    except FormParserError:
        raise _malformed("is damaged") from None
    return parts.form


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(
        f"the body {problem}; send multipart/form-data with a part `file`", stage="validate"
    )
