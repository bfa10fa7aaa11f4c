"""The bytes of images that clients put into their requests."""

from __future__ import annotations

import binascii
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.contract.errors import InvalidRequest
from weft.gateway.request import ImageFile
from weft.gateway.validate import invalid

_SHOWN_CHARS = 40
_PIECE_CHARS = 1 << 18
"""A multiple of 4."""


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

    data: bytes
    digest: bytes
    """BLAKE2b-256 of the data."""


def url_of(image: ImageFile) -> str:
    """The URL from which an image must be fetched; empty: it comes with the request."""
    source = image.source
    if isinstance(source, bytes):
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
    """The files of images, decoded where they are in base64, or `fetched` by their URLs. Raises
    ImageRefused if one has another form, InvalidRequest if they are too large.
    """
    encoded = [_encoded(image, fetched) for image in images]
    total = 0
    for image, text in zip(images, encoded, strict=True):
        num_bytes = len(text) if isinstance(text, bytes) else len(text) * 3 // 4
        total += num_bytes
        if num_bytes > limits.max_file_bytes:
            told = f"has {num_bytes} bytes; at most {limits.max_file_bytes} are accepted"
            raise invalid(image.where, told)
        if total > limits.max_bytes:
            raise too_large(image, limits.max_bytes)
    return [_source(image, text) for image, text in zip(images, encoded, strict=True)]


def _encoded(image: ImageFile, fetched: Mapping[str, bytes]) -> str | bytes:
    source = image.source
    if url := url_of(image):
        return fetched[url]
    if not source:
        raise ImageRefused(image, "is missing; give an image as data:image/...;base64,...")
    if isinstance(source, bytes):
        return source
    scheme, colon, _ = source[:_SHOWN_CHARS].partition(":")
    if not colon:
        return source
    if scheme.lower() != "data":
        raise ImageRefused(
            image,
            f"is a URL of `{scheme[:_SHOWN_CHARS]}:`, which is not read; give "
            "data:image/...;base64,...",
        )
    begin, comma, text = source.partition(",")
    if not comma or not begin.lower().endswith(";base64"):
        raise ImageRefused(image, "must have the form data:image/...;base64,...")
    return text


def _source(image: ImageFile, text: str | bytes) -> Source:
    try:
        data = text if isinstance(text, bytes) else _decode(text)
    except ValueError:  # binascii's errors are of this kind
        raise ImageRefused(image, "is not valid base64") from None
    if not data:
        raise ImageRefused(image, "is empty")
    return Source(data, hashlib.blake2b(data, digest_size=32).digest())


def _decode(text: str) -> bytes:
    try:
        return b"".join(_pieces(text))
    except ValueError:
        # Some encoders break lines.
        return b"".join(_pieces("".join(text.split())))


def _pieces(text: str) -> Iterator[bytes]:
    """Decodes in pieces, since each call holds Python's lock. Raises ValueError."""
    for start in range(0, len(text), _PIECE_CHARS):
        piece, end = text[start : start + _PIECE_CHARS], start + _PIECE_CHARS
        if end < len(text) and piece.endswith("="):
            raise ValueError("padding within the text")
        yield binascii.a2b_base64(piece, strict_mode=True)
