"""The prompts of a benchmark run: the same for every system, new in every turn."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

NUM_WARMUP_TOKENS = 8

_TOPICS = (
    "the tides, and why two high tides come each day rather than one",
    "a sourdough bread that fails to rise in a cold kitchen",
    "how a compiler turns a loop into machine code",
    "the history of paper, from China over Samarkand to Europe",
    "a lighthouse keeper who finds a letter in a bottle",
    "what a database does between a write and the answer to it",
    "the migration of storks and how they find their way",
    "a plan for a week in Lisbon with two children and little money",
    "why the sky is blue at noon and red in the evening",
    "the rules of chess for someone who has only ever played draughts",
    "how vaccines train the immune system to recognise what it has never met",
    "an argument between two neighbours about an apple tree",
    "the difference between a hash table and a balanced tree",
    "how to repair a bicycle puncture at the side of a road in the rain",
    "the sound of a violin and what the wood has to do with it",
    "a robot that learns to paint by watching the sea",
)
_DETAIL = (
    "Begin with what everyone knows and go on to what surprises.",
    "Give one example with numbers and say where they come from.",
    "Mention a common mistake and how to avoid it.",
    "Use short sentences, and name the people and places involved.",
)


class Prompts:
    """Makes prompts as token ids.

    Each begins with a number of its own: no two share a page of cached prefix, so every system
    computes every prompt.

    Args:
        tokenizer: The model's.
        seed: Other seeds give other prompts.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    def short(self, count: int) -> list[list[int]]:
        """Prompts of some 25 to 90 tokens."""
        return [self._encode(self._essay(index)) for index in range(count)]

    def long(self, num_tokens: int) -> list[int]:
        """A prompt of exactly so many tokens."""
        ids: list[int] = []
        while len(ids) < num_tokens:
            ids += self._encode(self._essay(self._rng.randrange(len(_TOPICS))))
        return ids[:num_tokens]

    def _essay(self, index: int) -> str:
        number = self._rng.randrange(10**9)
        detail = " ".join(_DETAIL[: self._rng.randrange(len(_DETAIL) + 1)])
        return f"{number}. An essay about {_TOPICS[index % len(_TOPICS)]}. {detail}\n\n"

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
