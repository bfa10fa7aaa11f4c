"""Measures with which whitespace between the tokens of JSON a model answers best.

    python bench/json_forms.py                      the demo model
    python bench/json_forms.py --model DIR --tasks 64 --max-tokens 96

Each task gives a sentence and a schema, and has one right answer. The first table has, for each
form that a constraint may enforce, the share of answers that end before `--max-tokens`, that are
valid under the schema and that are right, and the tokens that they take. The second has the mean
log-probability of the whole right answer without a constraint, by its spelling.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jsonschema
from harness import Harness, Run
from tokenizers import Tokenizer
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.contract.request import Constraint, SamplingParams, StopCriteria
from weft.engine.features.constraints import grammar
from weft.engine.loop.llm import LLM

FORMS: dict[str, dict[str, Any]] = {
    "compact": {"whitespace_flexible": False},
    "one blank behind , and :": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    },
    "at most one blank behind , and :": {
        "whitespace_flexible": False,
        "item_separator": ", ?",
        "key_separator": ": ?",
    },
    "at most one blank anywhere": {"whitespace_pattern": "[ ]"},
    "up to 32 blanks and breaks anywhere": {"whitespace_pattern": r"[ \n\r\t]{1,32}"},
}
"""Options of llguidance's JSON."""
SPELLINGS: dict[str, Callable[[Any], str]] = {
    "compact": lambda value: json.dumps(value, separators=(",", ":")),
    "one blank behind , and :": json.dumps,
    "lines, two blanks deep": lambda value: json.dumps(value, indent=2),
    "lines, four blanks deep": lambda value: json.dumps(value, indent=4),
}
NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun")
CITIES = ("Bergen", "Lima", "Oslo", "Kyoto", "Porto", "Quito", "Riga", "Turin")


class Task(NamedTuple):
    """A question with one right answer."""

    question: str
    schema: dict[str, Any]
    right: Any


def of_object(**properties: str) -> dict[str, Any]:
    """A schema of an object with required properties of these types."""
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
        "additionalProperties": False,
    }


def make_task(rng: random.Random) -> Task:
    """A random task."""
    name, city, age = rng.choice(NAMES), rng.choice(CITIES), rng.randrange(12, 90)
    kind = rng.randrange(4)
    if kind == 0:
        told, right = f"{name} is {age} years old.", {"name": name, "age": age}
        schema = of_object(name="string", age="integer")
    elif kind == 1:
        told = f"{name} lives in {city} and is {age} years old."
        right = {"name": name, "city": city, "age": age}
        schema = of_object(name="string", city="string", age="integer")
    elif kind == 2:
        rainy = rng.random() < 0.5
        told = f"In {city} it is {age - 10} degrees and {'rainy' if rainy else 'dry'}."
        right = {"city": city, "degrees": age - 10, "rainy": rainy}
        schema = of_object(city="string", degrees="integer", rainy="boolean")
    else:
        people = rng.sample(NAMES, 3)
        told, right = f"{', '.join(people)} met in {city}.", {"city": city, "people": people}
        schema = of_object(city="string", people="array")
        schema["properties"]["people"]["items"] = {"type": "string"}
    asked = " and ".join(right)
    return Task(f"{told} Answer with a JSON object that has {asked}.", schema, right)


def chat(question: str) -> str:
    """The question in the demo model's template of chats."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def answers(
    llm: LLM,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    tasks: Sequence[Task],
    options: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, float]:
    """Shares of answers under a form, and their tokens."""
    grammar.DEFAULT_FORM.clear()
    grammar.DEFAULT_FORM.update(options)
    sampling = [
        SamplingParams(
            temperature=args.temperature,
            seed=number,
            # The description tells apart the same schema under different forms.
            constraint=Constraint(
                kind="json_schema",
                text=json.dumps({**task.schema, "description": json.dumps(options)}),
            ),
        )
        for number, task in enumerate(tasks)
    ]
    found = llm.generate(
        prompts, sampling, StopCriteria(max_tokens=args.max_tokens), max_at_once=16
    )
    ended = valid = right = 0
    for sample, task in zip(found, tasks, strict=True):
        if sample.finish_reason != "stop":
            continue
        ended += 1
        value = json.loads(tokenizer.decode(sample.token_ids, skip_special_tokens=True))
        valid += jsonschema.Draft202012Validator(task.schema).is_valid(value)
        right += value == task.right
    return {
        "ended": ended / len(tasks),
        "valid": valid / len(tasks),
        "right": right / len(tasks),
        "tokens": statistics.fmean(len(sample.token_ids) for sample in found),
    }


def written(llm: LLM, tokenizer: Tokenizer, prompt: Sequence[int], text: str) -> float:
    """Log-probability of a text and the end behind it."""
    ids = tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False).ids
    (sample,) = llm.generate([[*prompt, *ids]], stop=StopCriteria(max_tokens=1), prompt_logprobs=0)
    assert sample.prompt_logprobs is not None
    return sum(one.logprob for one in sample.prompt_logprobs[-len(ids) :])


harness = Harness(__file__, __doc__)
harness.flag("--model", default=DEMO_NAME)
harness.flag("--tasks", type=int, default=64)
harness.flag("--max-tokens", type=int, default=96)
harness.flag("--temperature", type=float, default=0.0)
harness.flag("--seed", type=int, default=69)


@harness.part
def forms(run: Run) -> None:
    """Answers under all forms, and the log-probability of all spellings."""
    options = run.options
    folder, rng = resolve_model(options.model), random.Random(options.seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tasks = [make_task(rng) for _ in range(options.tasks)]
    prompts = [
        tokenizer.encode(chat(task.question), add_special_tokens=False).ids for task in tasks
    ]
    llm = run.stack.enter_context(LLM(folder, num_pages=4096))
    for name, form in FORMS.items():
        found = answers(llm, tokenizer, prompts, tasks, form, options)
        run.row(found, table="shares of answers", form=name)
    for name, spell in SPELLINGS.items():
        logprobs = [
            written(llm, tokenizer, prompt, spell(task.right))
            for prompt, task in zip(prompts, tasks, strict=True)
        ]
        run.row(table="right answers", spelling=name, logprob=statistics.fmean(logprobs))


if __name__ == "__main__":
    sys.exit(harness.main())
