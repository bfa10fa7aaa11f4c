"""Synthetic chats: their messages, and their times of arrival."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from weft.contract.keys import ShortKeys

PAGE_SIZE = 16
_FIRST_ID = 3
"""Ids before are special ones."""
_KEYS_BEGIN = bytes(32)


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation; the answers between its messages are the model's."""

    name: str
    start_s: float
    """Start after the beginning of the run."""
    system: Sequence[int]
    """Token ids that other chats begin with as well."""
    messages: Sequence[Sequence[int]]
    """The user's messages, as tokens."""
    pauses_s: Sequence[float]
    """Pauses between an answer and the next message."""


def make_chats(
    count: int,
    rate: float,
    vocab_size: int,
    seed: int,
    *,
    num_systems: int = 12,
    system_tokens: tuple[int, int] = (200, 600),
    message_tokens: tuple[int, int] = (10, 80),
    turns: tuple[int, int] = (2, 6),
    pause_s: float = 1.0,
) -> list[Chat]:
    """Chats in the order of their beginning.

    Args:
        count: Number of chats.
        rate: Chats that begin a second, in the mean; the gaps are exponential.
        vocab_size: Vocabulary size of the model.
        seed: Seed of all draws.
        num_systems: System prompts, drawn by Zipf's law (exponent 1).
        system_tokens: Least and most of a system prompt.
        message_tokens: Least and most tokens of a message.
        turns: Least and most turns of a chat.
        pause_s: Mean of the exponential pauses between turns.
    """
    rng = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> list[int]:
        return [rng.randrange(_FIRST_ID, vocab_size) for _ in range(rng.randint(*bounds))]

    systems = [tokens(system_tokens) for _ in range(num_systems)]
    shares = list(itertools.accumulate(1 / rank for rank in range(1, num_systems + 1)))
    chats, start_s = [], 0.0
    for number in range(count):
        start_s += rng.expovariate(rate)
        num_turns = rng.randint(*turns)
        chats.append(
            Chat(
                name=f"chat-{number}",
                start_s=start_s,
                system=rng.choices(systems, cum_weights=shares)[0],
                messages=[tokens(message_tokens) for _ in range(num_turns)],
                pauses_s=[rng.expovariate(1 / pause_s) for _ in range(num_turns - 1)],
            )
        )
    return chats


class EndlessCache:
    """The oracle: what a single unlimited cache would have to compute.

    It knows every prompt from the moment it is sent, and every answer when it has ended, in whole
    pages; the last token of a prompt is always computed.
    """

    def __init__(self) -> None:
        self._pages: set[int] = set()
        self.computed_tokens = 0
        """Tokens computed of the prompts that were sent."""
        self.prompt_tokens = 0
        """All tokens of these prompts."""

    def sent(self, prompt: Sequence[int]) -> None:
        """Records the start of a request."""
        keys = _page_keys(prompt[:-1])
        num_known = next((at for at, key in enumerate(keys) if key not in self._pages), len(keys))
        self.prompt_tokens += len(prompt)
        self.computed_tokens += len(prompt) - num_known * PAGE_SIZE
        self._pages.update(keys)

    def ended(self, tokens: Sequence[int]) -> None:
        """A request ended; `tokens` are its prompt and its answer.

        The KV of the last token is never computed.
        """
        self._pages.update(_page_keys(tokens[:-1]))


def _page_keys(tokens: Sequence[int]) -> list[int]:
    num_pages = len(tokens) // PAGE_SIZE
    return ShortKeys(tokens, PAGE_SIZE, _KEYS_BEGIN).upto(num_pages)[:num_pages]
