"""Questions on scenes with their answers, and chats of them as token ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from tokenizers import Tokenizer

from image_training.scenes import Scene
from image_training.things import Thing

NUMBERS = ("None", "One", "Two", "Three", "Four")
WHAT = (
    "What is in the picture?", "What is this?", "What do you see?", "What does the image show?",
    "What is in this image?", "Describe the picture.", "What can you see in the picture?",
)  # fmt: skip
COUNTS = (
    "How many {} are there?", "How many {} are in the picture?", "How many {} do you see?",
    "Count the {}.",
)  # fmt: skip
IS_THERE = ("Is there {} in the picture?", "Is there {}?", "Do you see {}?")
COLOUR = ("What colour is the background?", "What color is the background?")
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
IMAGE, FAKE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
TAKEN = {"<gh_stars>": IMAGE, "<issue_start>": FAKE, "<issue_comment>": GLOBAL}
"""Special tokens of the language model that chats never have, and what they are used for."""


def describe(scene: Scene, things: Sequence[Thing]) -> str:
    """The answer to `WHAT`."""
    parts = []
    for kind in scene.kinds:
        count = scene.things.count(kind)
        thing = things[kind]
        text = thing.with_article if count == 1 else f"{NUMBERS[count].lower()} {thing.plural}"
        parts.append(text)
    listed = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"{listed[0].upper()}{listed[1:]}."


def ask(dice: random.Random, scene: Scene, things: Sequence[Thing]) -> list[tuple[str, str]]:
    """Questions and answers in a random order: what there is, how many, and one more."""
    kind = dice.choice(scene.kinds)
    if dice.random() < 0.08:
        kind = dice.randrange(len(things))
    count = f"{NUMBERS[scene.things.count(kind)]}."
    turns = [
        (dice.choice(WHAT), describe(scene, things)),
        (dice.choice(COUNTS).format(things[kind].plural), count),
    ]
    if scene.ground is not None and dice.random() < 0.5:
        turns.append((dice.choice(COLOUR), f"{scene.ground.capitalize()}."))
    else:
        kind = dice.choice(scene.kinds) if dice.random() < 0.5 else dice.randrange(len(things))
        answer = "Yes." if kind in scene.kinds else "No."
        turns.append((dice.choice(IS_THERE).format(things[kind].with_article), answer))
    dice.shuffle(turns)
    return turns


class Chat(NamedTuple):
    tokens: list[int]
    answers: list[int]
    """Positions of the tokens of answers, their ends included."""
    image: int
    """Position of the first token of the image."""


class Chats:
    """Makes token ids of chats about one image, which takes `num_rows` tokens."""

    def __init__(self, tokenizer: Tokenizer, num_rows: int) -> None:
        names = {name: taken for taken, name in TAKEN.items()}
        self._ids = cache(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        begin = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
        self._begin = [*self._ids(begin), *self._ids(names[FAKE]), *self._ids(names[GLOBAL])]
        self._image = self._ids(names[IMAGE]) * num_rows
        self._behind = self._ids(names[FAKE])

    def of(self, turns: Sequence[tuple[str, str]]) -> Chat:
        """An answer that is empty is to be written by the model."""
        tokens, answers = [*self._begin, *self._image, *self._behind], list[int]()
        for number, (question, answer) in enumerate(turns):
            if number:
                tokens += self._ids("<|im_start|>user\n")
            tokens += self._ids(question)
            tokens += self._ids("<|im_end|>\n<|im_start|>assistant\n")
            if answer:
                own = [*self._ids(answer), *self._ids("<|im_end|>")]
                answers += range(len(tokens), len(tokens) + len(own))
                tokens += [*own, *self._ids("\n")]
        return Chat(tokens, answers, len(self._begin))
