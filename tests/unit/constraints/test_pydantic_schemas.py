"""Schemas that pydantic writes: each is accepted, and what is generated is valid."""

from __future__ import annotations

import datetime
import decimal
import json
import random
import uuid
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, IPvAnyAddress, TypeAdapter
from weft.testing.engine.constraint_texts import compiled, random_text
from weft.testing.kernels.kernel_checks import fresh_seed


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tags: set[str] = set()


class Node(BaseModel):
    value: Annotated[int, Field(ge=-9, le=9)]
    children: list[Node] = []


SHAPES: list[Any] = [
    *(set[str], frozenset[str], list[set[str]], set[str] | None, set[Colour], set[bool]),
    Annotated[set[str], Field(min_length=2, max_length=3)],
    *(decimal.Decimal, Annotated[decimal.Decimal, Field(max_digits=6, decimal_places=2)]),
    *(datetime.timedelta, datetime.date, datetime.time, uuid.UUID, IPvAnyAddress),
    *(Annotated[Cat | Dog, Field(discriminator="kind")], Node, list[Node]),
    *(dict[str, int], dict[Colour, float], dict[int, Dog], dict[str, list[Cat]]),
    *(Annotated[str, Field(min_length=1, max_length=8, pattern="^[a-z]+$")], bytes),
    *(Annotated[int, Field(gt=0, le=50, multiple_of=5)], Annotated[float, Field(ge=0, lt=1)]),
    *(Literal["kg", "lb", 3, None], int | str | None, float | bool),
    *(tuple[int, str], tuple[float, ...], tuple[()], list[Any], Any),
]


@pytest.mark.parametrize("mode", ["validation", "serialization"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_are_accepted_and_generated(shape: Any, mode: Any) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(shape)
    schema = adapter.json_schema(mode=mode)
    fresh_seed()
    grammar, rng = compiled(schema), random.Random(random.random())
    validator = Draft202012Validator(schema)
    for _ in range(3):
        text = random_text(grammar, rng)
        validator.validate(json.loads(text))
