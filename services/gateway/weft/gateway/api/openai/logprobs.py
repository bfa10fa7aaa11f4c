"""Log-probabilities in OpenAI's shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from weft.gateway.text.detokenize import Detokenizer, Vocabulary
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


class TextOffsets:
    """Where the tokens of one sample begin in its text, in characters.

    A token that begins within a character has that character's offset; a token without text has the
    next token's offset.
    """

    def __init__(self, detokenizer: Detokenizer, offset: int) -> None:
        """Begins at `offset`, with a detokenizer like that of the sample's text."""
        self._detokenizer = detokenizer
        self._offset = offset

    def take(self, ids: Iterable[int]) -> list[int]:
        """The offsets of the next tokens."""
        offsets: list[int] = []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token_id))
        return offsets


def completion_logprobs(
    vocabulary: Vocabulary,
    entries: Sequence[common_pb2.TokenLogprob],
    offsets: list[int],
    most: int | None = None,
) -> dict[str, list[Any]]:
    """The `logprobs` object of a completion choice. `offsets` says where each entry's token begins
    in the choice's text, in characters. At most `most` alternatives are shown at each position;
    None: all.
    """
    tokens: list[str] = []
    alternatives: list[dict[str, float]] = []
    for entry in entries:
        token = _completion_token(vocabulary, entry.token_id)
        tokens.append(token)
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
    }


def _completion_token(vocabulary: Vocabulary, token_id: int) -> str:
    r"""Parts of characters have names such as `bytes:\xe4\xbd`, since the texts are keys too."""
    data = vocabulary.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(_LEAST, logprob) if not math.isnan(logprob) else _LEAST
