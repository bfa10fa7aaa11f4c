"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from weft.gateway.text.vocabulary import Vocabulary
from weft.v1 import common_pb2

_LEAST = -9999.0
"""Replacement for minus infinity, which JSON does not have."""


def chat_logprobs(
    vocabulary: Vocabulary, entries: Sequence[common_pb2.TokenLogprob]
) -> dict[str, object]:
    """The `logprobs` object of a chat choice."""
    content = [
        {
            **_chat_entry(vocabulary, entry.token_id, entry.logprob),
            "top_logprobs": [_chat_entry(vocabulary, t.token_id, t.logprob) for t in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": vocabulary.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def completion_logprobs(
    vocabulary: Vocabulary,
    entries: Sequence[common_pb2.TokenLogprob],
    offset: int,
    most: int | None = None,
) -> tuple[dict[str, list[Any]], int]:
    """The `logprobs` object of a completion choice.

    Args:
        vocabulary: The model's.
        entries: Entries of consecutive tokens.
        offset: Characters of the choice's text before them.
        most: Alternatives shown at each position; None: all that there are.

    Returns:
        The object, and the offset behind the entries. A token that begins within a character has
        that character's offset.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    alternatives: list[dict[str, float]] = []
    for entry in entries:
        token = _completion_token(vocabulary, entry.token_id)
        tokens.append(token)
        data = vocabulary.token_bytes(entry.token_id)
        begun = [byte & 0xC0 != 0x80 for byte in data]  # UTF-8: a character begins here
        offsets.append(offset if not begun or begun[0] else max(0, offset - 1))
        offset += sum(begun)
        top = {
            _completion_token(vocabulary, t.token_id): finite(t.logprob) for t in entry.top[:most]
        }
        top.setdefault(token, finite(entry.logprob))
        alternatives.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [finite(entry.logprob) for entry in entries],
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }, offset


def _completion_token(vocabulary: Vocabulary, token_id: int) -> str:
    r"""Text of a token; parts of characters have names such as `bytes:\xe4\xbd`, since they are
    keys too.
    """
    data = vocabulary.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """The number as JSON can have it."""
    return max(_LEAST, logprob) if not math.isnan(logprob) else _LEAST
