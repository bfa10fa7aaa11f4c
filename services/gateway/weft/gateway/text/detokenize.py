"""Text and bytes of tokens, and incremental detokenisation that never splits a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from tokenizers import Tokenizer
from weft.checkpoint.tokenizer_files import decoder_types

_REPLACEMENT = "\ufffd"
_CONTEXT_TOKENS = 5
"""Number of prompt tokens decoded as context of the first generated one (a leading space)."""
_MAX_CHARACTER_BYTES = 4
_MAX_HELD_TOKENS = 16
"""Most tokens that are held back because a character is incomplete; no character has more."""


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2 and its successors: the byte of each printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


class _TokenBytes(dict[int, bytes]):
    def __init__(self, compute: Callable[[int], bytes]) -> None:
        super().__init__()
        self._compute = compute

    def __missing__(self, token_id: int) -> bytes:
        found = self[token_id] = self._compute(token_id)
        return found


class Vocabulary:
    """The texts of one tokenizer's ids. Read-only after construction, apart from caches."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Truncation and padding of the tokenizer must be off."""
        self.tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        """Ids whose text is skipped unless the request wants special tokens."""
        self.added_ids = {token.content: id_ for id_, token in added.items()}
        """Ids of the texts that are always one token."""
        self.is_byte_level = decoder_types(tokenizer) == ["ByteLevel"]
        """Whether the text of a sequence is the concatenation of its tokens' bytes, decoded as
        UTF-8.
        """
        self.bytes_of = _TokenBytes(self._compute_bytes)
        """The bytes that each token contributes, computed when first asked for; empty for ids
        outside the vocabulary.

        Exact for byte-level tokenizers; elsewhere the UTF-8 form of the token decoded alone.
        """
        self.plain_texts: dict[int, str] = {}
        """Texts of tokens that are not special, wherever no character is incomplete before them;
        only of byte-level tokenizers, and of tokens that were shown.
        """
        self._texts: dict[int, str] = {}

    def token_bytes(self, token_id: int) -> bytes:
        return self.bytes_of[token_id]

    def token_text(self, token_id: int) -> str:
        """A token as text, for log-probabilities; U+FFFD where its bytes are no whole character."""
        found = self._texts.get(token_id)
        if found is None:
            found = self._texts[token_id] = self.token_bytes(token_id).decode("utf-8", "replace")
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        token = self.tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes([_BYTE_OF_CHAR[char] for char in token])
            except KeyError:  # an added token with characters outside the alphabet is itself
                return token.encode("utf-8", "surrogatepass")
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        if token_id in self.special_ids:
            return token.encode()
        # The token is decoded after a copy of itself, since tokenizers drop a leading space at the
        # start of a text.
        alone = self.tokenizer.decode([token_id, token_id], skip_special_tokens=False)
        once = self.tokenizer.decode([token_id], skip_special_tokens=False)
        text = alone[len(once) :] if len(alone) >= 2 * len(once) else once
        return text.encode()


class Detokenizer(Protocol):
    """Converts the tokens of one sample to text as they arrive.

    The concatenation of all returned pieces equals the decoded whole. Valid text never shows U+FFFD
    in between.
    """

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is certain by now, often empty."""
        ...

    def push_all(self, ids: Sequence[int]) -> str:
        """`push` of each of these tokens."""
        ...

    def finish(self) -> str:
        """Returns the rest, with U+FFFD for a character that was never completed."""
        ...


def make_detokenizer(
    vocabulary: Vocabulary,
    prompt_ids: Sequence[int],
    skip_special_tokens: bool,
    shown_ids: Collection[int] = (),
) -> Detokenizer:
    """Creates the cheapest detokeniser that is exact for the vocabulary.

    Args:
        prompt_ids: Tokens before the first one; only the last few matter.
        skip_special_tokens: Special tokens give no text.
        shown_ids: Special tokens that give text all the same.
    """
    if vocabulary.is_byte_level:
        return ByteDetokenizer(vocabulary, skip_special_tokens, shown_ids)
    return WindowDetokenizer(vocabulary, prompt_ids, skip_special_tokens, shown_ids)


def _skipped(vocabulary: Vocabulary, skips: bool, shown_ids: Collection[int]) -> frozenset[int]:
    return vocabulary.special_ids.difference(shown_ids) if skips else frozenset()


class ByteDetokenizer:
    """Detokenizer for byte-level tokenizers: a table lookup per token, and an incremental UTF-8
    decoder for characters of several tokens.
    """

    __slots__ = ("_bytes_of", "_decoder", "_is_whole", "_plain_texts", "_skipped", "_special_ids")

    def __init__(
        self, vocabulary: Vocabulary, skip_special_tokens: bool, shown_ids: Collection[int] = ()
    ) -> None:
        self._bytes_of = vocabulary.bytes_of
        self._special_ids = vocabulary.special_ids
        self._skipped = _skipped(vocabulary, skip_special_tokens, shown_ids)
        self._plain_texts = vocabulary.plain_texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_whole = True
        """Whether the bytes so far end with a whole character."""

    def push(self, token_id: int) -> str:
        if self._is_whole and (known := self._plain_texts.get(token_id)) is not None:
            return known
        if token_id in self._skipped:
            return ""
        was_whole = self._is_whole
        text = self._decode(self._bytes_of[token_id])
        if was_whole and self._is_whole and token_id not in self._special_ids:
            self._plain_texts[token_id] = text
        return text

    def _decode(self, data: bytes) -> str:
        text = self._decoder.decode(data)
        self._is_whole = not self._decoder.getstate()[0]
        return text

    def push_all(self, ids: Sequence[int]) -> str:
        bytes_of, skipped = self._bytes_of, self._skipped
        if not skipped.isdisjoint(ids):
            ids = [token_id for token_id in ids if token_id not in skipped]
        return self._decode(b"".join([bytes_of[token_id] for token_id in ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", True)


class WindowDetokenizer:
    """Detokenizer for any tokenizer: decodes a short window with and without the new tokens.

    ```
    _ids:  | context: text returned already | held: text not certain yet |
           0                             _split                       len(_ids)
    ```
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        shown_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = vocabulary.tokenizer
        self._skipped = _skipped(vocabulary, skip_special_tokens, shown_ids)
        self._ids, self._context = self._context_of(prompt_ids)
        self._split = len(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        is_open = text.endswith(_REPLACEMENT) or len(text) <= len(self._context)
        if is_open and len(self._ids) - self._split < _MAX_HELD_TOKENS:
            return ""
        return self._advance(text)

    def push_all(self, ids: Sequence[int]) -> str:
        return "".join(map(self.push, ids))

    def finish(self) -> str:
        return self._advance(self._decode(self._ids))

    def _context_of(self, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens, and their text. They begin at a character if possible, since
        some tokenizers decode nothing from bytes that begin inside one.
        """
        found: list[tuple[list[int], str]] = []
        for count in range(_CONTEXT_TOKENS, _CONTEXT_TOKENS + _MAX_CHARACTER_BYTES):
            ids = [one for one in prompt_ids[-count:] if one not in self._skipped]
            found.append((ids, self._decode(ids)))
            if _REPLACEMENT not in found[-1][1]:
                return found[-1]
        return found[0]

    def _advance(self, text: str) -> str:
        delta = text[len(self._context) :]
        self._ids = self._ids[self._split :]
        self._split = len(self._ids)
        self._context = self._decode(self._ids)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if ids else ""
