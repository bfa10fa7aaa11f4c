"""Text and bytes of single tokens."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer
from weft.checkpoint.tokenizer_files import decoder_types


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
