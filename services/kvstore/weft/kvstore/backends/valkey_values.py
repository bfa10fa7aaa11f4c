"""Pages as values in a Valkey server: an identifying header, then the bytes.

    name    PREFIX:1:KEY (hexadecimal), KEY of the page; 1 is the version of this layout
    value   header of 68 bytes, then the page:
            magic  4 s   "WKV1"
            size   u64   bytes of the page
            digest u64   of the page's bytes
            parent 32 s  key of the page before it in its prompt; zeros: unknown
            group  8 s   group in which pages of its namespace are counted
            check  u64   BLAKE2b-64 of the page's key and of the header up to here

Numbers are little-endian. The digest identifies the bytes, and the check binds them to their key: a
value that was cut short, changed, or returned for another key is refused. Neither is a signature:
whoever may write to the server may write any page.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_FIELDS = struct.Struct("<4sQQ32s8s")
_CHECK_BYTES = 8
HEADER_BYTES = _FIELDS.size + _CHECK_BYTES
_MAGIC = b"WKV1"
_NO_PARENT = bytes(32)


@dataclass(frozen=True, slots=True)
class StoredPage:
    """A page unpacked from a value, its bytes not yet checked."""

    digest: int
    parent: bytes
    """Key of the page before; empty: not known."""
    group: bytes
    content: memoryview
    """Bytes of the page."""


def value_name(prefix: str, key: bytes) -> bytes:
    """Name under which the page with a key is stored."""
    return f"{prefix}:1:{key.hex()}".encode()


def pack(key: bytes, digest: int, parent: bytes, group: bytes, content: NDArray[np.uint8]) -> bytes:
    """Packs a page into its value.

    Args:
        key: 32 bytes.
        parent: Key of the page before it in its prompt; empty: unknown.
        group: At most 8 bytes.
        content: uint8 `[page_bytes]`, contiguous.
    """
    fields = _FIELDS.pack(_MAGIC, content.nbytes, digest, parent or _NO_PARENT, group)
    return b"".join((fields, _check(key, fields), content.data))


def unpack(key: bytes, value: bytes) -> StoredPage | None:
    """Unpacks a value; None if it is another page's or incomplete."""
    view = memoryview(value)
    fields, content = view[: _FIELDS.size], view[HEADER_BYTES:]
    if len(view) < HEADER_BYTES or view[_FIELDS.size : HEADER_BYTES] != _check(key, fields):
        return None
    magic, num_bytes, digest, parent, group = _FIELDS.unpack(fields)
    if magic != _MAGIC or num_bytes != len(content):
        return None
    return StoredPage(digest, b"" if parent == _NO_PARENT else parent, group, content)


def _check(key: bytes, fields: bytes | memoryview) -> bytes:
    return hashlib.blake2b(key + bytes(fields), digest_size=_CHECK_BYTES).digest()
