"""The model's vocabulary in the form that llguidance needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer
from weft.checkpoint.tokenizer_files import decoder_types, read_tokenizer

_SPACE = "\u2581"
"""How vocabularies with a Metaspace decoder write a space."""


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """The bytes of each token of a model. Special tokens have no bytes, because their text may be
    dropped from the answer; nor have ids that the tokenizer lacks. `vocab_size` may be larger than
    the tokenizer's.
    """
    decoders = decoder_types(tokenizer)
    byte_of = _byte_of_char() if "ByteLevel" in decoders else None
    has_spaces = "Metaspace" in decoders or "Replace" in decoders
    spelled = [b""] * vocab_size
    for token, token_id in tokenizer.get_vocab().items():
        if token_id < vocab_size:
            spelled[token_id] = _spelled(token, byte_of, has_spaces=has_spaces)
    for token_id, added in tokenizer.get_added_tokens_decoder().items():
        if token_id < vocab_size:
            spelled[token_id] = b"" if added.special else added.content.encode()
    return spelled


def _spelled(token: str, byte_of: dict[str, int] | None, *, has_spaces: bool) -> bytes:
    if byte_of is not None and all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    text = token.replace(_SPACE, " ") if has_spaces else token
    return text.encode("utf-8", "surrogatepass")


def _byte_of_char() -> dict[str, int]:
    """The byte-level alphabet of GPT-2 and its successors: the byte of each printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class _Spelling:
    """The tokens as llguidance reads them. It never tokenizes a text, since no grammar forces
    tokens.
    """

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def tokenizer_of(tokens: Sequence[bytes], eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Makes llguidance's tokenizer. `tokens` has the bytes of each token, by id; `eos_token_ids`
    may follow when a grammar is complete.
    """
    wrapped = TokenizerWrapper(_Spelling(tokens, eos_token_ids[0]))
    return LLTokenizer(wrapped, eos_token=list(eos_token_ids))


def load_vocabulary(model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Reads the `tokenizer.json` of a model directory. `eos_token_ids` may follow when a grammar is
    complete. Raises ModelError if the files give no tokenizer.
    """
    tokenizer = read_tokenizer(model_dir).tokenizer
    return tokenizer_of(token_bytes(tokenizer, vocab_size), eos_token_ids)
