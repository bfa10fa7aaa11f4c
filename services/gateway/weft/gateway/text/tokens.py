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


def encode_cut(
    tokenizer: Tokenizer, text: str, most: int, add_special_tokens: bool = True
) -> list[int]:
    """Tokenises a text to at most `most` tokens; those that the tokenizer adds behind it stay."""
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    ids = list(encoding.ids)
    tail = _num_added_behind(encoding.special_tokens_mask)
    return ids if len(ids) <= most else [*ids[: max(0, most - tail)], *ids[len(ids) - tail :]]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, most: int | None = None
) -> tuple[list[int], int]:
    """Tokenises two texts as the tokenizer joins them; too long ones lose the end of the second.

    Args:
        tokenizer: The model's.
        first: A text.
        second: Another one.
        most: Tokens at most; None: any number.

    Returns:
        The ids, and the position of the first token of the second text; 0: it does not tell texts
        apart.
    """
    (encoding,) = tokenizer.encode_batch([(first, second)], add_special_tokens=True)
    ids, kinds = list(encoding.ids), list(encoding.type_ids)
    start = kinds.index(1) if 1 in kinds else 0
    if most is not None and len(ids) > most:
        tail = _num_added_behind(encoding.special_tokens_mask)
        ids = [*ids[: max(0, most - tail)], *ids[len(ids) - tail :]]
    return ids, start


def _num_added_behind(mask: Sequence[int]) -> int:
    """Tokens that the tokenizer added behind a text, by its mask of such tokens."""
    count = 0
    while count < len(mask) and mask[-1 - count]:
        count += 1
    return count


def decode(tokenizer: Tokenizer, many: Sequence[Sequence[int]]) -> list[str]:
    """Decodes lists of token ids, special tokens included."""
    lists = [list(ids) for ids in many]
    return list(tokenizer.decode_batch(lists, skip_special_tokens=False))
