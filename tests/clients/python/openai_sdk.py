"""The official Python SDK: chats, streams, tools, parsed answers, responses."""

import json

from openai import OpenAI
from pydantic import BaseModel, Field
from settings import ENOUGH, MODEL, QUESTION, WEATHER

client = OpenAI()


class City(BaseModel):
    """What an answer is to be."""

    name: str = Field(max_length=20)
    population: int = Field(ge=0, le=100_000_000)


assert MODEL in [model.id for model in client.models.list()]

chat = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": QUESTION}], max_tokens=12, temperature=0
)
text = chat.choices[0].message.content
assert text
assert chat.usage is not None
assert chat.usage.completion_tokens <= 12

chunks = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": QUESTION}],
    max_tokens=12,
    temperature=0,
    stream=True,
    stream_options={"include_usage": True},
)
pieces = list(chunks)
assert "".join(c.choices[0].delta.content or "" for c in pieces if c.choices) == text
assert pieces[-1].usage.total_tokens == chat.usage.total_tokens  # cached ones may differ

called = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "How is the weather in Paris?"}],
    tools=[{"type": "function", "function": WEATHER}],
    tool_choice="required",
    max_tokens=ENOUGH,
)
call = called.choices[0].message.tool_calls[0]
assert call.function.name == "get_weather"
assert isinstance(json.loads(call.function.arguments)["city"], str)

parsed = client.chat.completions.parse(
    model=MODEL,
    messages=[{"role": "user", "content": "Name a city."}],
    response_format=City,
    max_tokens=ENOUGH,
)
assert isinstance(parsed.choices[0].message.parsed, City)

answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16, temperature=0)
assert answer.output_text
following = client.responses.create(
    model=MODEL,
    input="And again?",
    previous_response_id=answer.id,
    max_output_tokens=16,
    temperature=0,
)
assert following.output_text
assert following.usage.input_tokens > answer.usage.input_tokens
with client.responses.stream(
    model=MODEL, input=QUESTION, max_output_tokens=16, temperature=0
) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_response()
assert kinds[0] == "response.created"
assert "response.output_text.delta" in kinds
assert final.output_text == answer.output_text
