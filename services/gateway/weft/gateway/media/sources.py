"""The bytes of images and clips that clients put into their requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.contract.errors import InvalidRequest
from weft.gateway.long_text import LongText
from weft.gateway.request import MediaFile
from weft.gateway.validate import invalid

_SHOWN_CHARS = 40
_MAX_BEGIN_CHARS = 1024
"""The first comma of a data URL must lie within so many characters."""


class MediaRefused(InvalidRequest):
    """One file cannot be read; the others may be."""

    def __init__(self, file: MediaFile, problem: str) -> None:
        super().__init__(f"{file.where}: {problem}", stage="validate", param=file.where)
        self.file = file
        self.problem = problem


class FetchFailed(Exception):
    """A URL gave no file; the text says why, with the URL as its subject."""


class FetchForbidden(FetchFailed):
    """A URL that the gateway does not follow."""


class SourceLimits(NamedTuple):
    """Bounds of a request's images and clips."""

    max_files: int
    max_bytes: int
    """Of all files together."""
    max_file_bytes: int
    """Of an image."""
    max_audio_bytes: int
    """Of a clip."""
    max_video_bytes: int

    def of_file(self, file: MediaFile) -> int:
        """Most bytes of a file."""
        if file.modality == "image":
            return self.max_file_bytes
        return self.max_audio_bytes if file.modality == "audio" else self.max_video_bytes


class Source(NamedTuple):
    """The file of an image or a clip."""

    data: memoryview
    is_base64: bool
    """Whether `data` are the file's text in base64, which media processes decode."""
    digest: bytes
    """Names both within this gateway."""


def url_of(file: MediaFile) -> str:
    """The URL from which a file must be fetched; empty: it comes with the request."""
    source = file.source
    if not isinstance(source, str):
        return ""
    scheme, colon, _ = source[:_SHOWN_CHARS].partition(":")
    return source if colon and scheme.lower() in ("http", "https") else ""


def check_number(files: Sequence[MediaFile], max_files: int) -> None:
    """Raises InvalidRequest if there are too many files."""
    if len(files) > max_files:
        raise invalid(
            files[max_files].where,
            f"is file {max_files + 1} of {len(files)}; at most {max_files} are accepted in one "
            "request",
        )


def too_large(file: MediaFile, max_bytes: int) -> InvalidRequest:
    """The error of a request whose files have more than `max_bytes` bytes."""
    return invalid(file.where, f"the request's files have more than {max_bytes} bytes")


def read_sources(
    files: Sequence[MediaFile], limits: SourceLimits, fetched: Mapping[str, bytes]
) -> list[Source]:
    """The content of files, or what was `fetched` by their URLs. Raises MediaRefused if one has
    another form, InvalidRequest if they are too large.
    """
    found = [_content(file, fetched) for file in files]
    total = 0
    for file, (data, is_base64) in zip(files, found, strict=True):
        num_bytes = len(data) * 3 // 4 if is_base64 else len(data)
        total += num_bytes
        if num_bytes > (most := limits.of_file(file)):
            told = f"has {num_bytes} bytes; at most {most} are accepted"
            raise invalid(file.where, told)
        if total > limits.max_bytes:
            raise too_large(file, limits.max_bytes)
        if not data:
            raise MediaRefused(file, "is empty")
    return [
        Source(data, is_base64, hashlib.sha256(data).digest() + bytes([is_base64]))
        for data, is_base64 in found
    ]


def _content(file: MediaFile, fetched: Mapping[str, bytes]) -> tuple[memoryview, bool]:
    """The bytes of a file, or of its text in base64, and whether they are the latter."""
    source = file.source
    if url := url_of(file):
        return memoryview(fetched[url]), False
    if not source:
        raise MediaRefused(file, f"is missing; give a file as {_wanted(file)}")
    if isinstance(source, bytes):
        return memoryview(source), False
    start = _start_of_base64(file, _head_of(source, _MAX_BEGIN_CHARS))
    if isinstance(source, LongText):
        return source.bytes_from(start), True
    return memoryview(source.encode("ascii", "replace"))[start:], True


def _wanted(file: MediaFile) -> str:
    return f"data:{file.modality}/...;base64,..."


def _head_of(source: str | LongText, num_chars: int) -> str:
    return source.head(num_chars) if isinstance(source, LongText) else source[:num_chars]


def _start_of_base64(file: MediaFile, head: str) -> int:
    """Where the data begin, in a text that begins so."""
    scheme, colon, _ = head[:_SHOWN_CHARS].partition(":")
    if not colon:
        return 0
    if scheme.lower() != "data":
        raise MediaRefused(
            file,
            f"is a URL of `{scheme[:_SHOWN_CHARS]}:`, which is not read; give {_wanted(file)}",
        )
    begin, comma, _ = head.partition(",")
    if not comma or not begin.isascii() or not begin.lower().endswith(";base64"):
        raise MediaRefused(file, f"must have the form {_wanted(file)}")
    return len(begin) + 1
