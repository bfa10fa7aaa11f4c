"""The bytes of images that clients put into their requests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from weft.contract.errors import InvalidRequest
from weft.gateway.long_text import LongText
from weft.gateway.request import ImageFile
from weft.gateway.validate import invalid

_SHOWN_CHARS = 40
_MAX_BEGIN_CHARS = 1024
"""The first comma of a data URL must lie within so many characters."""


class ImageRefused(InvalidRequest):
    """One image cannot be read; the others may be."""

    def __init__(self, image: ImageFile, problem: str) -> None:
        super().__init__(f"{image.where}: {problem}", stage="validate", param=image.where)
        self.image = image
        self.problem = problem


class FetchFailed(Exception):
    """A URL gave no file; the text says why, with the URL as its subject."""


class FetchForbidden(FetchFailed):
    """A URL that the gateway does not follow."""


class SourceLimits(NamedTuple):
    """Bounds of a request's images."""

    max_files: int
    max_bytes: int
    """Of all files together."""
    max_file_bytes: int


class Source(NamedTuple):
    """The file of an image."""

    data: memoryview
    is_base64: bool
    """Whether `data` are the file's text in base64, which media processes decode."""
    digest: bytes
    """Names both within this gateway."""


def url_of(image: ImageFile) -> str:
    """The URL from which an image must be fetched; empty: it comes with the request."""
    source = image.source
    if not isinstance(source, str):
        return ""
    scheme, colon, _ = source[:_SHOWN_CHARS].partition(":")
    return source if colon and scheme.lower() in ("http", "https") else ""


def check_number(images: Sequence[ImageFile], max_files: int) -> None:
    """Raises InvalidRequest if there are too many images."""
    if len(images) > max_files:
        raise invalid(
            images[max_files].where,
            f"is image {max_files + 1} of {len(images)}; at most {max_files} are accepted in one "
            "request",
        )


def too_large(image: ImageFile, max_bytes: int) -> InvalidRequest:
    """The error of a request whose images have more than `max_bytes` bytes."""
    return invalid(image.where, f"the request's images have more than {max_bytes} bytes")


def read_sources(
    images: Sequence[ImageFile], limits: SourceLimits, fetched: Mapping[str, bytes]
) -> list[Source]:
    """The files of images, or `fetched` by their URLs. Raises ImageRefused if one has another form,
    InvalidRequest if they are too large.
    """
    found = [_content(image, fetched) for image in images]
    total = 0
    for image, (data, is_base64) in zip(images, found, strict=True):
        num_bytes = len(data) * 3 // 4 if is_base64 else len(data)
        total += num_bytes
        if num_bytes > limits.max_file_bytes:
            told = f"has {num_bytes} bytes; at most {limits.max_file_bytes} are accepted"
            raise invalid(image.where, told)
        if total > limits.max_bytes:
            raise too_large(image, limits.max_bytes)
        if not data:
            raise ImageRefused(image, "is empty")
    return [
        Source(data, is_base64, hashlib.sha256(data).digest() + bytes([is_base64]))
        for data, is_base64 in found
    ]


def _content(image: ImageFile, fetched: Mapping[str, bytes]) -> tuple[memoryview, bool]:
    """The bytes of a file, or of its text in base64, and whether they are the latter."""
    source = image.source
    if url := url_of(image):
        return memoryview(fetched[url]), False
    if not source:
        raise ImageRefused(image, "is missing; give an image as data:image/...;base64,...")
    if isinstance(source, bytes):
        return memoryview(source), False
    start = _start_of_base64(image, _head_of(source, _MAX_BEGIN_CHARS))
    if isinstance(source, LongText):
        return source.bytes_from(start), True
    return memoryview(source.encode("ascii", "replace"))[start:], True


def _head_of(source: str | LongText, num_chars: int) -> str:
    return source.head(num_chars) if isinstance(source, LongText) else source[:num_chars]


def _start_of_base64(image: ImageFile, head: str) -> int:
    """Where the data begin, in a text that begins so."""
    scheme, colon, _ = head[:_SHOWN_CHARS].partition(":")
    if not colon:
        return 0
    if scheme.lower() != "data":
        raise ImageRefused(
            image,
            f"is a URL of `{scheme[:_SHOWN_CHARS]}:`, which is not read; give "
            "data:image/...;base64,...",
        )
    begin, comma, _ = head.partition(",")
    if not comma or not begin.isascii() or not begin.lower().endswith(";base64"):
        raise ImageRefused(image, "must have the form data:image/...;base64,...")
    return len(begin) + 1
