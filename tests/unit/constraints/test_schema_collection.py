"""Schemas that others wrote: nearly all are accepted, and no answer is invalid.

`WEFT_JSON_SCHEMAS` names the folder `maskbench/data` of github.com/guidance-ai/jsonschemabench,
which has no licence that would let this repository have it.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from jsonschema import ValidationError, validators
from weft.engine.features.constraints.compiling import STACK_BYTES
from weft.testing.engine.constraint_texts import accepts, compiled, random_text
from weft.testing.kernels.kernel_checks import fresh_seed

FOLDER = os.environ.get("WEFT_JSON_SCHEMAS", "")
NUM_SCHEMAS = 1000
LEAST_ACCEPTED = 0.92
MOST_ENDED = 0.01
"""Largest share of answers that a limit of llguidance may end."""
LIMIT = "lexer error: too many"


SPACES = r" \t\n\v\f\r\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


def pattern_of_ecma(pattern: str) -> str:
    """The same in Python's syntax, with its flag for ASCII: blanks are more than those of ASCII,
    and the end is no place before a last line end.
    """
    written, is_class = "", False
    for part in re.findall(r"\\.|.", pattern, re.DOTALL):
        if part == "\\s":
            part = SPACES if is_class else f"[{SPACES}]"
        elif part == "$" and not is_class:
            part = r"\Z"
        is_class = part == "[" or (is_class and part != "]")
        written += part
    return written


def problem(schema: Any, text: str) -> str:
    """Why an answer is invalid; empty: it is not, or jsonschema cannot tell."""

    def check(validator: Any, pattern: str, instance: Any, schema: Any) -> Any:
        if isinstance(instance, str) and not re.search(
            pattern_of_ecma(pattern), instance, re.ASCII
        ):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    kind = validators.validator_for(schema, default=validators.Draft202012Validator)
    try:
        found = next(
            validators.extend(kind, {"pattern": check})(schema).iter_errors(json.loads(text)), None
        )
    except Exception:  # whatever a strange schema makes a validator raise
        return ""
    return "" if found is None else f"{found.message[:200]}: {text[:300]}"


def judge(file: Path, rng: random.Random) -> tuple[str, list[str]]:
    """Why a file's schema is refused, and what is wrong with answers under it."""
    content = json.loads(file.read_text())
    schema = content["schema"]
    try:
        grammar = compiled(schema)
    except ValueError as error:
        return str(error), []
    wrong = [
        f"{file.name}: allows {json.dumps(test['data'])[:300]}"
        for test in content["tests"]
        if not test["valid"] and accepts(grammar, json.dumps(test["data"], ensure_ascii=False))
    ]
    try:
        text = random_text(grammar, rng)
    except AssertionError as error:
        return "", wrong if "no end within" in str(error) else [*wrong, f"{file.name}: {error}"]
    if told := problem(schema, text):
        wrong.append(f"{file.name}: {told}")
    return "", wrong


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FOLDER, reason="schemas: WEFT_JSON_SCHEMAS names no folder")
def test_nearly_all_schemas_are_accepted_and_no_answer_is_invalid() -> None:
    fresh_seed()
    rng = random.Random(random.random())
    files = rng.sample(sorted(Path(FOLDER).glob("*.json")), NUM_SCHEMAS)
    refused, wrong, ended = list[str](), list[str](), list[str]()

    def run() -> None:
        for file in files:
            why, found = judge(file, rng)
            refused.extend([f"{file.name}: {why}"] if why else [])
            for told in found:
                (ended if LIMIT in told else wrong).append(told)

    # llguidance recurses for each level of a grammar, as in the engine's own threads.
    before = threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=run)
    thread.start()
    threading.stack_size(before)
    thread.join()
    num_accepted = NUM_SCHEMAS - len(refused)
    print(f"accepted {num_accepted} of {NUM_SCHEMAS}, {len(ended)} answers were ended")
    print("\n".join([*refused, *ended]))
    assert not wrong, "\n".join(wrong)
    assert num_accepted >= LEAST_ACCEPTED * NUM_SCHEMAS
    assert len(ended) <= MOST_ENDED * NUM_SCHEMAS
