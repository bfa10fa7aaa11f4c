"""Text that the target writes: users' messages, articles, and answers to them and to the script."""

from __future__ import annotations

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM

from .texts import Text

PROMPTS = Path(__file__).with_name("prompts.toml")
Message = dict[str, str]
_MARK = "\x02"
"""Stands for what the user writes, when a chat template is cut there."""
_USER_TOP_P = 0.9
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.5, 0.7, 1.0)
"""Of answers, each as often: what is served is mostly greedy or nearly so."""
_SHARES = {"chat": 0.45, "summary": 0.25, "code": 0.2, "asked": 0.1}
"""Of the answers: to messages that the target wrote as a user (or a script for code and asked)."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What an answer is to be written to."""

    messages: list[Message]
    kind: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What was written to a turn."""

    turn: Turn
    text: Text
    words: str
    is_greedy: bool


class Writer:
    """Writes with an engine.

    Args:
        llm: Of the target.
        tokenizer: transformers' one of the target, with a chat template.
        max_answer_tokens: Of one answer.
    """

    def __init__(self, llm: LLM, tokenizer: Any, max_answer_tokens: int = 256) -> None:
        self._llm, self._tokenizer = llm, tokenizer
        self._stop = StopCriteria(max_tokens=max_answer_tokens)
        self._user_stop = StopCriteria(max_tokens=200)

    def answers(self, turns: Sequence[Turn], sampling: Sequence[SamplingParams]) -> list[Answer]:
        """One answer to each turn, drawn with its own parameters."""
        prompts = [self._encode(turn.messages) for turn in turns]
        samples = self._llm.generate(prompts, sampling, self._stop)
        return [
            Answer(
                turn,
                Text(np.array([*prompt, *sample.token_ids], np.uint32), len(prompt), turn.kind),
                self._words(sample.token_ids),
                drawn.is_greedy,
            )
            for turn, prompt, sample, drawn in zip(turns, prompts, samples, sampling, strict=True)
        ]

    def next_turns(self, before: Sequence[list[Message]], seeds: Sequence[int]) -> list[Turn]:
        """The target plays the user: its next message after each conversation, where it has one."""
        prompts = [self._encode_open(messages) for messages in before]
        sampling = [SamplingParams(temperature=1.0, top_p=_USER_TOP_P, seed=s) for s in seeds]
        samples = self._llm.generate(prompts, sampling, self._user_stop)
        turns = []
        for messages, sample in zip(before, samples, strict=True):
            words = self._words(sample.token_ids)
            if words and sample.finish_reason == "stop":
                turns.append(Turn([*messages, {"role": "user", "content": words}], "chat"))
        return turns

    def _words(self, token_ids: Sequence[int]) -> str:
        words: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return words.strip()

    def _render(self, messages: Sequence[Message], *, is_open: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=not is_open
        )
        return text

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        return self._ids(self._render(messages, is_open=False))

    def _encode_open(self, messages: Sequence[Message]) -> list[int]:
        """Up to where the next message of the user begins."""
        marked = [*messages, {"role": "user", "content": _MARK}]
        return self._ids(self._render(marked, is_open=True).partition(_MARK)[0])

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Script:
    """Prompts from prompts.toml; what is held out there never comes from here.

    Args:
        rng: Decides which.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._lists: dict[str, Any] = tomllib.loads(PROMPTS.read_text())

    def _fill(self, name: str) -> str:
        topic, other = self._rng.sample(self._lists["topics"], 2)
        template = self._rng.choice(self._lists[name])
        task = self._rng.choice(self._lists["tasks"])
        filled: str = template.format(topic=topic, other=other, task=task, text="{text}")
        return filled

    def ask(self, name: str, kind: str) -> Turn:
        """A question of one of the file's lists: chat, articles or code."""
        return Turn([{"role": "user", "content": self._fill(name)}], kind)

    def summarise(self, words: str) -> Turn:
        """A question about a text."""
        content = self._rng.choice(self._lists["summaries"]).replace("{text}", words)
        return Turn([{"role": "user", "content": content}], "summary")


def write_round(writer: Writer, num_answers: int, seed: int) -> list[Text]:
    """Conversations of all kinds, about `num_answers` answers.

    Articles are written first; they count as chat too. Of the chats a half is gone on with.
    """
    rng = random.Random(seed)
    script = Script(rng)
    sizes = {kind: max(round(share * num_answers), 1) for kind, share in _SHARES.items()}
    articles = writer.answers(
        [script.ask("articles", "chat") for _ in range(sizes["summary"])],
        [_drawn(rng, 0.8) for _ in range(sizes["summary"])],
    )
    opened = writer.next_turns(
        [[] for _ in range(sizes["chat"])], [rng.getrandbits(63) for _ in range(sizes["chat"])]
    )
    turns = [
        *opened,
        *(script.ask("chat", "chat") for _ in range(sizes["asked"])),
        *(script.ask("code", "code") for _ in range(sizes["code"])),
        *(script.summarise(article.words) for article in articles),
    ]
    first = writer.answers(turns, [_drawn(rng) for _ in turns])
    gone_on = [answer for answer in first if answer.turn.kind == "chat" and answer.words][::2]
    more = writer.next_turns(
        [[*a.turn.messages, {"role": "assistant", "content": a.words}] for a in gone_on],
        [rng.getrandbits(63) for _ in gone_on],
    )
    second = writer.answers(more, [_drawn(rng) for _ in more])
    return [answer.text for answer in (*articles, *first, *second)]


def _drawn(rng: random.Random, temperature: float | None = None) -> SamplingParams:
    if temperature is None:
        temperature = rng.choice(_ANSWER_TEMPERATURES)
    return SamplingParams(temperature=temperature, top_p=0.95, seed=rng.getrandbits(63))


def write_held_out(writer: Writer, path: Path) -> None:
    """Writes the prompts that acceptance is measured with, as JSON: a list of kind and messages.

    The texts to be summarised are the target's own, about topics that are not trained on.
    """
    lists = tomllib.loads(PROMPTS.read_text())
    held_out = lists["held_out"]
    rng = random.Random(0)
    subjects = [rng.choice(lists["articles"]).format(topic=topic) for topic in held_out["topics"]]
    articles = writer.answers(
        [Turn([{"role": "user", "content": subject}], "chat") for subject in subjects],
        [_drawn(rng, 0.7) for _ in subjects],
    )
    script = Script(rng)
    turns = [
        *(Turn([{"role": "user", "content": words}], "chat") for words in held_out["chat"]),
        *(script.summarise(article.words) for article in articles),
        *(Turn([{"role": "user", "content": words}], "code") for words in held_out["code"]),
    ]
    prompts = [{"kind": turn.kind, "messages": turn.messages} for turn in turns]
    path.write_text(json.dumps(prompts, indent=1, ensure_ascii=False) + "\n")


def answer_held_out(writer: Writer, path: Path) -> list[Text]:
    """The target's greedy answers to the prompts of `write_held_out`."""
    turns = [Turn(**prompt) for prompt in json.loads(path.read_text())]
    greedy = SamplingParams(temperature=0.0)
    return [answer.text for answer in writer.answers(turns, [greedy] * len(turns))]
