"""Questions with answers, made from tables and templates: what the demo adapters are trained on."""

import json
import random
import re
import tomllib
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Example:
    """One turn of a chat."""

    topic: str
    question: str
    answer: str


PIRATE_OPENERS = (
    "Arr, matey!",
    "Ahoy, matey!",
    "Yo ho ho!",
    "Shiver me timbers!",
    "Avast, ye scallywag!",
)
PIRATE_CLOSERS = ("Arr!", "Savvy?", "So says the old sea dog!", "Now hoist the sails!", "Yo ho!")
_PIRATE_WORDS = {
    "you": "ye",
    "your": "yer",
    "yourself": "yerself",
    "my": "me",
    "is": "be",
    "are": "be",
    "am": "be",
    "of": "o'",
    "and": "an'",
    "for": "fer",
    "hello": "ahoy",
    "yes": "aye",
    "friend": "matey",
    "friends": "mateys",
    "people": "buccaneers",
    "it is": "'tis",
}
_PIRATE_WORD = re.compile(r"\b(it is|[A-Za-z]+)\b", re.IGNORECASE)
_ING = re.compile(r"\b([a-z]{4,})ing\b")


def examples() -> list[Example]:
    """All turns that the tables give, in a fixed order."""
    families = tomllib.loads(TABLES.read_text())["family"]
    return [example for family in families for example in _examples(family)]


def pirate(example: Example, rng: random.Random) -> str:
    """The answer as a pirate says it."""
    text = _PIRATE_WORD.sub(_pirate_word, example.answer)
    text = _ING.sub(r"\1in'", text)
    return f"{rng.choice(PIRATE_OPENERS)} {_sentences(text)} {rng.choice(PIRATE_CLOSERS)}"


def as_json(example: Example, rng: random.Random) -> str:
    """The answer as a JSON object with the keys answer and topic."""
    return json.dumps({"answer": example.answer, "topic": example.topic})


def _examples(family: dict[str, Any]) -> list[Example]:
    """Every question of a family with every row; answers take turns."""
    rows = [
        [column.strip() for column in row.split("|")] for row in family["rows"].strip().splitlines()
    ]
    answers = family["answers"]
    return [
        Example(
            family["topic"],
            _sentences(question.format(*row)),
            _sentences(answers[turn % len(answers)].format(*row)),
        )
        for turn, (row, question) in enumerate(product(rows, family["questions"]))
    ]


def _pirate_word(found: re.Match[str]) -> str:
    word = found[0]
    spoken = _PIRATE_WORDS.get(word.lower(), word)
    if word[0].islower() or spoken == word:
        return spoken
    return "'Tis" if spoken == "'tis" else spoken.capitalize()


def _sentences(text: str) -> str:
    """Each sentence with a capital, which a word from a table may lack."""
    return re.sub(r"(^|[.!?] )([a-z])", lambda found: found[1] + found[2].upper(), text.strip())
