"""Schemas that zod writes: each is accepted, and what is generated is valid.

`zod_schemas.json` is what `z.toJSONSchema` of zod 4.6.7 has for its types, by type, without those
that it has for others already: `cd tests/clients && node zod_schemas.mjs`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from weft.testing.engine.constraint_texts import compiled, random_text
from weft.testing.engine.schema_judge import problem
from weft.testing.kernels.kernel_checks import fresh_seed

SCHEMAS: dict[str, Any] = json.loads(Path(__file__).with_name("zod_schemas.json").read_text())


@pytest.mark.parametrize("name", SCHEMAS)
def test_shapes_are_accepted_and_generated(name: str) -> None:
    schema = SCHEMAS[name]
    fresh_seed()
    rng, grammar = random.Random(random.random()), compiled(schema)
    for _ in range(2):
        text = random_text(grammar, rng)
        # llguidance and `regex` have the pictures of different versions of Unicode.
        assert name == "emoji" or not problem(schema, text)
