"""Byte-level BPE as tokenizer.json has it. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def byte_pair_tokenizer(
    vocabulary: Mapping[str, int],
    merges: Sequence[Sequence[str]],
    special: Iterable[tuple[int, str]],
    *,
    pre_tokenizer: Mapping[str, Any],
    decoder: Mapping[str, Any],
    post_processor: Mapping[str, Any] | None = None,
    ignores_merges: bool = False,
) -> dict[str, Any]:
    """The content of a tokenizer.json.

    Args:
        special: Ids and texts of special tokens.
        ignores_merges: Whether a piece of text that is a token becomes it, whatever merges say.
    """
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": content, **flags, "special": True}
            for number, content in special
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": post_processor,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignores_merges,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def byte_letters() -> Sequence[str]:
    """The letter for each byte in byte-level vocabularies (GPT-2's)."""
    own = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    letters = {byte: chr(byte) for byte in own}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]
