"""Tokenisation and detokenisation of texts of any length.

The tokenizers library holds Python's lock during `encode` and `decode`, so a megabyte of text would
stop the event loop for a second. This module uses the library's batch functions, which release the
lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenises a text."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def decode(tokenizer: Tokenizer, many: Sequence[Sequence[int]]) -> list[str]:
    """Decodes lists of token ids, special tokens included."""
    lists = [list(ids) for ids in many]
    return list(tokenizer.decode_batch(lists, skip_special_tokens=False))
