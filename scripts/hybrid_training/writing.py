"""Stories and answers that the demo model writes."""

from __future__ import annotations

import hashlib
import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from draft_training.writing import PROMPTS as TOPICS
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM

PROMPTS = Path(__file__).with_name("prompts.toml")
TEMPERATURE = 0.7
_TOP_P = 0.95
_STORIES = 0.6
"""Share of the prompts; the others are questions."""
_HELD_OUT = 64
"""One prompt of so many is held out, with all that is ever written to it."""


class Turn(NamedTuple):
    """A prompt and what was written to it."""

    prompt: str
    answer: str
    is_whole: bool
    """Whether the model ended the answer itself."""


class Script:
    """Draws prompts.

    Args:
        seed: Decides which.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._lists: dict[str, Any] = tomllib.loads(PROMPTS.read_text())
        self._topics: list[str] = tomllib.loads(TOPICS.read_text())["topics"]

    def prompt(self) -> str:
        """One prompt."""
        rng, lists = self._rng, self._lists
        if rng.random() >= _STORIES:
            question: str = rng.choice(lists["questions"])
            return question.format(topic=rng.choice(self._topics))
        hero, other = rng.sample(lists["heroes"], 2)
        story: str = rng.choice(lists["stories"])
        return story.format(
            hero=hero,
            hero_first=hero[0].upper() + hero[1:],
            other=other,
            event=rng.choice(lists["events"]),
            place=rng.choice(lists["places"]),
        )


def is_held_out(prompt: str) -> bool:
    """Whether nothing written to a prompt is trained on."""
    return hashlib.blake2b(prompt.encode(), digest_size=8).digest()[0] % _HELD_OUT == 0


def chat(tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    """Each prompt as a conversation that the model is to go on with."""
    asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts: list[str] = tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    return texts


def write(
    llm: LLM, tokenizer: Any, prompts: Sequence[str], seed: int, max_tokens: int, at_once: int
) -> list[Turn]:
    """Answers to prompts, drawn at `TEMPERATURE`.

    Args:
        llm: Of the demo model.
        tokenizer: transformers' one of it.
        prompts: What is asked.
        seed: The same seed gives the same answers from the same device.
        max_tokens: Of an answer.
        at_once: Requests under way.
    """
    rng = random.Random(seed)
    ids = tokenizer(chat(tokenizer, prompts), add_special_tokens=False)["input_ids"]
    sampling = [
        SamplingParams(temperature=TEMPERATURE, top_p=_TOP_P, seed=rng.getrandbits(63))
        for _ in prompts
    ]
    stop = StopCriteria(max_tokens=max_tokens)
    samples = llm.generate(ids, sampling, stop, max_at_once=at_once)
    answers = tokenizer.batch_decode(
        [sample.token_ids for sample in samples], skip_special_tokens=True
    )
    return [
        Turn(prompt, answer.strip(), sample.finish_reason == "stop")
        for prompt, answer, sample in zip(prompts, answers, samples, strict=True)
    ]
