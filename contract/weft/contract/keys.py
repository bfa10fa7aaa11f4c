"""Page identity: chained BLAKE2b-256 keys (test vectors: protos/vectors/page_key.json)."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from sys import byteorder
from typing import NamedTuple

import numpy as np
from weft.contract.arrays import Int64Array
from weft.contract.spans import MediaSpan, spans_within

HASH_VERSION = 2
"""Version of keys and digests: workers of different versions exchange no pages."""
_MAX_RECENT = 256
"""Most prompts of `RecentPages`."""
ROOT_KEY = bytes(32)
"""Parent key of a prompt's first page."""
TOKEN_BYTES = 4
"""Bytes of one token id in `token_bytes`."""


_OF_PAGES = hashlib.blake2b(digest_size=32, person=b"weft-page")
"""Hash object that is copied for each digest: a new one takes longer than hashing a page's tokens.
"""
_OF_BLOCKS = hashlib.blake2b(digest_size=32, person=b"weft-block")
"""Hash object that is copied for each digest of a page of a block."""


def _page_digest(parent: bytes, namespace: bytes, tokens: bytes, media: bytes = b"") -> bytes:
    state = _OF_PAGES.copy()
    state.update(parent + namespace + tokens + media)
    return state.digest()


class PromptMedia(NamedTuple):
    """Media among a prompt's tokens, as the keys of its pages name them."""

    spans: Sequence[MediaSpan] = ()
    encoder: bytes = b""
    """Digest of the encoder that makes their rows; empty: there are no media."""

    def in_page(self, start: int, end: int) -> bytes:
        """What the key of the page of positions [start, end) has of them: the encoder's digest, and
        of each span that touches the page the digest, and as u32 the row at the first place, that
        place in the page, and the number of rows. Empty for a page of text, whose key so stays that
        of its tokens.
        """
        if not self.spans:
            return b""
        parts = []
        for span, first, last in spans_within(self.spans, start, end):
            numbers = (span.offset + first - span.position, first - start, last - first)
            parts += [span.digest, *(number.to_bytes(4, "little") for number in numbers)]
        return self.encoder + b"".join(parts) if parts else b""


NO_MEDIA = PromptMedia()


def namespace_digest(
    model_digest: bytes, layout: str, *, adapter_digest: bytes = b"", cache_salt: str = ""
) -> bytes:
    """Digest of everything but the tokens that a page's content depends on.

    Args:
        model_digest: 32 bytes over weights, config, dtype and quantisation.
        layout: `CacheLayout.describe()`.
        adapter_digest: content digest of the adapter; empty for the base model.
        cache_salt: the tenant's salt; empty = shared.

    Returns:
        32 bytes.
    """
    fields = [model_digest, layout.encode(), adapter_digest, cache_salt.encode()]
    framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
    version = HASH_VERSION.to_bytes(4, "little")
    return hashlib.blake2b(version + framed, digest_size=32, person=b"weft-ns").digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    packed = array("I", tokens)
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def page_key(
    parent: bytes, tokens: Sequence[int], namespace: bytes, media: PromptMedia = NO_MEDIA
) -> bytes:
    """Key of the page of `tokens` that follows the page `parent`; 32 bytes. Positions of `media`
    count from the page's first token.
    """
    return _page_digest(parent, namespace, token_bytes(tokens), media.in_page(0, len(tokens)))


WIDE_TOKEN_BYTES = 8
"""Bytes of one position in the prefix cache of a model that takes media."""
_SPAN_SHIFT = 32
_MAX_NAMED_MEDIA = 1 << 14


class MediaNames:
    """Numbers by which the prefix cache of one process tells media apart: above all token ids, and
    never given twice. A medium whose number was forgotten gets a new one, and so is not found in
    that cache again; its keys stay the same.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[bytes, int] = OrderedDict()
        self._next = 1

    def of_rows(self, span: MediaSpan) -> Int64Array:
        """[length] int64: a number for each of the span's rows."""
        number = self._numbers.get(span.digest)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[span.digest] = number
            if len(self._numbers) > _MAX_NAMED_MEDIA:
                self._numbers.popitem(last=False)
        else:
            self._numbers.move_to_end(span.digest)
        return (number << _SPAN_SHIFT) + np.arange(span.offset, span.offset + span.length)


class PieceShape(NamedTuple):
    """How the pieces of a model's companions lie in pages of a KV store."""

    block_pages: int = 0
    """Pages of a piece; 0: the model has no companions."""
    window_pages: int = 0
    """Number of last pages whose pieces a request needs to continue; 0: it needs one piece."""
    state_pages: int = 0
    """Pages of pieces of other companions, of which a request needs one each. Their keys come first
    beside a page.
    """

    @property
    def pages_of_many(self) -> int:
        """Pages of each of a lease's pieces; 0: it has one."""
        return self.block_pages if self.window_pages else 0


def block_keys(key: bytes, num_pages: int, first: int = 0) -> list[bytes]:
    """Keys of pages that carry what companions have beside the page `key`, wherever it is kept in
    pages; 32 bytes each.

    Args:
        first: Number of such keys before these.
    """
    keys = []
    for index in range(first, first + num_pages):
        state = _OF_BLOCKS.copy()
        state.update(key + index.to_bytes(4, "little"))
        keys.append(state.digest())
    return keys


def blocks_keys(
    keys: Sequence[bytes], num_pages: int, block_pages: int, state_pages: int = 0
) -> list[bytes]:
    """Keys of the pages of several pieces: that of the last page `keys[-1]` first, then those of
    the pages before it.

    Args:
        keys: Of consecutive pages of a prompt, from its first one on.
        num_pages: Pages of all pieces.
        block_pages: Pages of each; 0: there is one piece.
        state_pages: As many of `num_pages` come first: they are beside the last page alone, for
            other companions (`PieceShape`).
    """
    rest = num_pages - state_pages
    size = block_pages or rest
    count = rest // size if size else 0
    last = keys[max(0, len(keys) - count) :]
    others = block_keys(keys[-1], state_pages) if keys else []
    return [
        *others,
        *(own for key in reversed(last) for own in block_keys(key, size, state_pages)),
    ]


SHORT_KEY_BYTES = 8


def short_key(key: bytes) -> int:
    """The first bytes of a page key, as a little-endian number.

    Short keys serve to guess which worker holds a page. Only the whole key identifies a page.
    """
    return int.from_bytes(key[:SHORT_KEY_BYTES], "little")


def short_keys(keys: Sequence[bytes]) -> list[int]:
    words = np.frombuffer(b"".join(keys), "<u8")
    found: list[int] = words[:: len(ROOT_KEY) // SHORT_KEY_BYTES].tolist()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class HashedPages:
    """The first pages of a prompt and their keys."""

    group: tuple[bytes, int]
    """Namespace and page size."""
    data: bytes
    """The tokens of the pages, as `token_bytes` packs them."""
    short_keys: list[int]
    """Short keys of the pages; not to be changed."""
    last_key: bytes
    """Key of the last page."""


class RecentPages:
    """Prompts that were hashed lately: the next turn of a chat hashes its new pages alone.

    Args:
        max_bytes: Most bytes of their tokens; keys take about as many more.
    """

    def __init__(self, max_bytes: int = 16 << 20) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: deque[HashedPages] = deque()
        """The newest last."""

    def longest(self, group: tuple[bytes, int], data: bytes) -> HashedPages | None:
        """Finds the longest remembered prompt with which a new one begins; None: there is none.

        Args:
            group: Namespace and page size.
            data: The new prompt, as `token_bytes` packs it.
        """
        found = (each for each in self._known if each.group == group)
        fitting = (each for each in found if data.startswith(each.data))
        return max(fitting, key=lambda each: len(each.data), default=None)

    def replace(self, before: HashedPages | None, new: HashedPages) -> None:
        """Remembers `new`, and forgets the prompt `before` that it continues, if any. Beyond the
        limits the oldest prompts are forgotten.
        """
        if before is not None and before in self._known:
            self._known.remove(before)
            self._num_bytes -= len(before.data)
        self._known.append(new)
        self._num_bytes += len(new.data)
        while self._num_bytes > self._max_bytes or len(self._known) > _MAX_RECENT:
            self._num_bytes -= len(self._known.popleft().data)


class ShortKeys:
    """Short keys of a prompt's full pages, computed on demand.

    Args:
        tokens: The prompt; must not change.
        page_size: Token positions per page.
        namespace: 32 bytes.
        recent: Prompts that it may continue, to which it is added; None: it is hashed by itself, as
            every prompt with media is.
        media: Its media.
    """

    __slots__ = ("_data", "_group", "_keys", "_known", "_media", "_parent", "_recent", "_tokens")

    def __init__(
        self,
        tokens: Sequence[int],
        page_size: int,
        namespace: bytes,
        recent: RecentPages | None = None,
        media: PromptMedia = NO_MEDIA,
    ) -> None:
        self._tokens = tokens
        self._group = (namespace, page_size)
        self._parent = ROOT_KEY
        self._keys: list[int] = []
        self._recent = None if media.spans else recent
        self._media = media
        self._known: HashedPages | None = None
        self._data = b""

    def upto(self, num_pages: int) -> list[int]:
        """Keys of at least the first `num_pages` pages, which must be full.

        The caller must not change the returned list, which later calls extend.
        """
        keys = self._keys
        if not self._data and num_pages:
            self._begin()
        if len(keys) < num_pages:
            (namespace, size), key, whole, data = self._group, self._parent, [], self._data
            width = size * TOKEN_BYTES
            for start in range(len(keys) * width, num_pages * width, width):
                first = start // TOKEN_BYTES
                media = self._media.in_page(first, first + size)
                key = _page_digest(key, namespace, data[start : start + width], media)
                whole.append(key)
            keys += short_keys(whole)
            self._parent = key
            if self._recent is not None:
                before = self._known
                known = HashedPages(self._group, data[: num_pages * width], keys[:], key)
                self._recent.replace(before, known)
                self._known = known
        return keys

    def _begin(self) -> None:
        """Packs the prompt, and takes the keys of the pages that it shares with a recent one."""
        self._data = token_bytes(self._tokens)
        if self._recent is not None:
            self._known = self._recent.longest(self._group, self._data)
        if self._known is not None:
            self._keys += self._known.short_keys
            self._parent = self._known.last_key


class PageKeys:
    """Keys of the full pages of a growing token sequence, each computed once. The sequence is given
    with each call; it is always the same one, perhaps longer.

    Args:
        namespace: 32 bytes.
        page_size: Token positions per page.
        packed: `token_bytes` of its first tokens, if the caller has them.
        media: Media among its tokens.
        names: Numbers of media in the prefix cache; None: the model takes none.
    """

    __slots__ = ("_keys", "_media", "_names", "_packed", "_page_size", "_wide", "namespace")

    def __init__(
        self,
        namespace: bytes,
        page_size: int,
        packed: bytes = b"",
        media: PromptMedia = NO_MEDIA,
        names: MediaNames | None = None,
    ) -> None:
        self.namespace = namespace
        self._page_size = page_size
        self._keys: list[bytes] = []
        self._packed = packed
        self._media, self._names = media, names
        self._wide = b""

    @property
    def encoder(self) -> bytes:
        """Digest of the encoder of its media; empty: it has none."""
        return self._media.encoder if self._media.spans else b""

    def packed(self, tokens: Sequence[int], start: int, end: int) -> bytes:
        """Tokens [start, end) as the prefix cache compares them: `token_bytes`, or in a model that
        takes media `WIDE_TOKEN_BYTES` for each, which tell media apart. Those of the prompt are
        cached.
        """
        if self._names is None:
            return self._tokens(tokens, start, end)
        if end * WIDE_TOKEN_BYTES <= len(self._wide):
            return self._wide[start * WIDE_TOKEN_BYTES : end * WIDE_TOKEN_BYTES]
        symbols = np.array(tokens[start:end], "<i8")
        for span, first, last in spans_within(self._media.spans, start, end):
            rows = self._names.of_rows(span)[first - span.position : last - span.position]
            symbols[first - start : last - start] = rows
        data = symbols.tobytes()
        if start == 0:
            self._wide = data
        return data

    def _tokens(self, tokens: Sequence[int], start: int, end: int) -> bytes:
        if end * TOKEN_BYTES <= len(self._packed):
            return self._packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        data = token_bytes(tokens[start:end])
        if start == 0:
            self._packed = data
        return data

    def upto(self, tokens: Sequence[int], num_pages: int) -> list[bytes]:
        """Keys of the first `num_pages` pages of `tokens` (which must have that many).

        The caller must not change the returned list, which may be the internal one.
        """
        keys, size = self._keys, self._page_size
        if len(keys) < num_pages:
            parent = keys[-1] if keys else ROOT_KEY
            first = len(keys) * size
            data = self._tokens(tokens, first, num_pages * size)
            width = size * TOKEN_BYTES
            for start in range(0, len(data), width):
                at = first + start // TOKEN_BYTES
                media = self._media.in_page(at, at + size)
                parent = _page_digest(parent, self.namespace, data[start : start + width], media)
                keys.append(parent)
        return keys if len(keys) == num_pages else keys[:num_pages]

    def page(self, tokens: Sequence[int], index: int) -> tuple[bytes, bytes]:
        """A full page as the prefix cache compares it, and its key."""
        keys, size = self._keys, self._page_size
        start, end = index * size, (index + 1) * size
        data = token_bytes(tokens[start:end])
        if index > len(keys):
            self.upto(tokens, index)
        if index == len(keys):
            media = self._media.in_page(start, end)
            parent = keys[-1] if keys else ROOT_KEY
            keys.append(_page_digest(parent, self.namespace, data, media))
        symbol = data if self._names is None else self.packed(tokens, start, end)
        return symbol, keys[index]

    def adopt(self, keys: Sequence[bytes]) -> None:
        if len(self._keys) < len(keys):
            self._keys[:] = keys
