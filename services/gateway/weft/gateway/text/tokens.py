"""Tokenisation and detokenisation of texts of any length.

The tokenizers library holds Python's lock during `encode` and `decode`, so a megabyte of text would
stop the event loop for a second. This module uses the library's batch functions, which release the
lock.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from weft.contract.errors import InvalidRequest


def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Tokenises a text."""
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    return list(encoding.ids)


def encode_cut(
    tokenizer: Tokenizer, text: str, most: int, *, add_special_tokens: bool = True
) -> list[int]:
    """Tokenises a text to at most `most` tokens; those that the tokenizer adds after it stay.

    Raises:
        InvalidRequest: No token of the text would be left.
    """
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    ids = list(encoding.ids)
    if len(ids) <= most:
        return ids
    mask = encoding.special_tokens_mask
    if most <= sum(mask):
        raise _too_few(most, f"the tokenizer adds {sum(mask)} to each text")
    tail = _num_added_behind(mask)
    return [*ids[: most - tail], *ids[len(ids) - tail :]]


def encode_pair(
    tokenizer: Tokenizer, first: str, second: str, most: int | None = None
) -> tuple[list[int], int]:
    """Tokenises two texts as the tokenizer joins them, to at most `most` tokens. Returns the ids,
    and the position of the first token of the second text; 0: the tokenizer does not tell texts
    apart.

    Where they are too long, the longer one loses its end until both have one length, then both do:
    the strategy `longest_first` of transformers.

    Raises:
        InvalidRequest: No token of the second text would be left.
    """
    (encoding,) = tokenizer.encode_batch([(first, second)], add_special_tokens=True)
    kinds = encoding.type_ids
    start = kinds.index(1) if 1 in kinds else 0
    if most is None or len(encoding.ids) <= most:
        return list(encoding.ids), start
    parts = tokenizer.encode_batch([first, second], add_special_tokens=False)
    lengths = [len(part.ids) for part in parts]
    num_added = tokenizer.num_special_tokens_to_add(is_pair=True)
    if most < num_added + 2:
        raise _too_few(most, f"the tokenizer adds {num_added} to each pair of texts")
    least = min(*lengths, (most - num_added) // 2)
    kept = [least, most - num_added - least]
    if lengths[0] > lengths[1]:
        kept.reverse()
    for part, length in zip(parts, kept, strict=True):
        part.truncate(length)
    cut = tokenizer.post_process(parts[0], parts[1], add_special_tokens=True)
    return list(cut.ids), start - (lengths[0] - kept[0]) if start else 0


def encode_parts(
    tokenizer: Tokenizer,
    head: str,
    text: str,
    tail: str,
    most: int | None = None,
    needed: int = 0,
    *,
    of_text: Tokenizer | None = None,
) -> list[int]:
    """Tokenises three texts separately, to at most `most` tokens: the rest is cut from the end of
    the middle one.

    Args:
        needed: Leading characters of `text` of which none may be cut, nor the first one after them.
        of_text: The tokenizer of `text`; None: `tokenizer`.

    Raises:
        InvalidRequest: More than that would be cut.
    """
    before, behind = tokenizer.encode_batch([head, tail], add_special_tokens=False)
    (inner,) = (of_text or tokenizer).encode_batch([text], add_special_tokens=False)
    ids, room = list(inner.ids), len(inner.ids)
    if most is not None:
        room = most - len(before.ids) - len(behind.ids)
    if room < len(ids):
        own = sum(start < needed for start, _ in inner.offsets)
        if room <= own:
            around = len(before.ids) + len(behind.ids)
            raise _too_few(most, f"the query takes {own} tokens and the model's template {around}")
    return [*before.ids, *ids[:room], *behind.ids]


def _too_few(most: int | None, why: str) -> Exception:
    param = "truncate_prompt_tokens"
    message = f"{param}: a text cut to {most} tokens has nothing left: {why}"
    return InvalidRequest(message, stage="validate", param=param)


def _num_added_behind(mask: Sequence[int]) -> int:
    """Tokens that the tokenizer added after a text, by its mask of such tokens."""
    count = 0
    while count < len(mask) and mask[-1 - count]:
        count += 1
    return count


def decode(tokenizer: Tokenizer, many: Sequence[Sequence[int]]) -> list[str]:
    """Decodes lists of token ids, special tokens included."""
    lists = [list(ids) for ids in many]
    return list(tokenizer.decode_batch(lists, skip_special_tokens=False))
