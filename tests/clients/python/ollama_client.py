"""Ollama's client: chat, generate, streams, a schema, a list of models, an error."""

import json

import ollama
from settings import ENOUGH, MODEL, QUESTION, URL, WEATHER

client = ollama.Client(host=URL)
ASK = [{"role": "user", "content": QUESTION}]
BRIEF = {"num_predict": 12, "temperature": 0}

chat = client.chat(model=MODEL, messages=ASK, options=BRIEF)
assert chat.message.content
assert chat.done
assert chat.eval_count <= 12
streamed = "".join(
    part.message.content
    for part in client.chat(model=MODEL, messages=ASK, options=BRIEF, stream=True)
)
assert streamed == chat.message.content
assert client.generate(model=MODEL, prompt=QUESTION, options=BRIEF).response
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}},
    "required": ["name"],
    "additionalProperties": False,
}
answer = client.chat(model=MODEL, messages=ASK, format=schema, options={"num_predict": ENOUGH})
assert isinstance(json.loads(answer.message.content)["name"], str)
assert MODEL in [model.model.removesuffix(":latest") for model in client.list().models]
assert client.show(MODEL).modelinfo is not None
tools = [{"type": "function", "function": WEATHER}]
client.chat(model=MODEL, messages=ASK, tools=tools, options=BRIEF)
try:
    client.chat(model="no-such-model", messages=ASK)
except ollama.ResponseError as error:
    assert error.status_code == 404
else:
    raise AssertionError("a model that is not there was found")
