"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from weft.gateway.vocabulary import Vocabulary
from weft.v1 import common_pb2

_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


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
        "logprob": _finite(logprob),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def completion_logprobs(
    vocabulary: Vocabulary, entries: Sequence[common_pb2.TokenLogprob], offset: int
) -> tuple[dict[str, object], int]:
    """The `logprobs` object of a completion choice.

    Args:
        vocabulary: The model's.
        entries: Of consecutive tokens.
        offset: Characters of the choice's text before them.

    Returns:
        The object, and the offset behind the entries.
    """
    tokens: list[str] = []
    offsets: list[int] = []
    alternatives: list[dict[str, float]] = []
    for entry in entries:
        token = vocabulary.token_text(entry.token_id)
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
        top = {vocabulary.token_text(t.token_id): _finite(t.logprob) for t in entry.top}
        top.setdefault(token, _finite(entry.logprob))
        alternatives.append(top)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": alternatives,
        "text_offset": offsets,
    }, offset


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob) if not math.isnan(logprob) else _LEAST
