"""Instructor: typed answers by tool, by schema and by JSON."""

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from settings import ENOUGH, MODEL


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(), mode=mode)
    city = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a city and its population."}],
        response_model=City,
        max_tokens=ENOUGH,
        max_retries=3,
    )
    assert isinstance(city, City)
