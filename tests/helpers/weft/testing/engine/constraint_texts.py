"""What constraints allow, with a vocabulary of single bytes: every text is one way to spell it."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
from llguidance import LLMatcher
from weft.contract.request import Constraint
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.vocabulary import tokenizer_of

END = 256
SOURCE = GrammarSource(tokenizer_of([*(bytes([byte]) for byte in range(END)), b""], [END]))


def compiled(schema: Any) -> LLMatcher:
    """A schema's matcher; raises ValueError if it is refused."""
    return SOURCE.compile(Constraint(kind="json_schema", text=json.dumps(schema)))


def accepts(grammar: LLMatcher, text: str | bytes) -> bool:
    """Whether a whole text is of the grammar."""
    spelled = [*(text.encode() if isinstance(text, str) else text)]
    matcher = grammar.deep_copy()
    return matcher.try_consume_tokens(spelled) == len(spelled) and matcher.is_accepting()


def random_text(
    grammar: LLMatcher, rng: random.Random, favoured: bytes = b'"}]', most: int = 4000
) -> str:
    """A text that a random walk through the masks ends at.

    Args:
        grammar: At the beginning.
        rng: Draws the bytes.
        favoured: Bytes that are preferred where they may come, so that the walk ends.
        most: Most bytes.
    """
    matcher, spelled = grammar.deep_copy(), bytearray()
    while len(spelled) < most:
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        assert not matcher.is_error(), matcher.get_error()
        may_come = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        if END in may_come and (len(may_come) == 1 or rng.random() < 0.5):
            return spelled.decode()
        pool = may_come = [byte for byte in may_come if byte != END]
        # Characters of one byte are as likely as all others together.
        for wanted, share in ((favoured, 0.4), (range(0x80), 0.8)):
            chosen = [byte for byte in may_come if byte in wanted]
            if chosen and rng.random() < share:
                pool = chosen
                break
        byte = rng.choice(pool)
        spelled.append(byte)
        assert matcher.consume_token(byte)
    raise AssertionError(f"no end within {most} bytes: {spelled[:200]!r}")
