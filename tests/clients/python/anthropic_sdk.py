"""Anthropic's SDK: messages, streams, a forced tool, a count of tokens, an error."""

import anthropic
from settings import ENOUGH, MODEL, QUESTION, WEATHER

client = anthropic.Anthropic()
ASK = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}

assert MODEL in [model.display_name for model in client.models.list()]

message = client.messages.create(model=MODEL, max_tokens=12, extra_body=GREEDY, messages=ASK)
assert message.content[0].type == "text"
assert message.usage.output_tokens <= 12

with client.messages.stream(model=MODEL, max_tokens=12, extra_body=GREEDY, messages=ASK) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == message.content[0].text
assert final.stop_reason == message.stop_reason

tool = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}
called = client.messages.create(
    model=MODEL,
    max_tokens=ENOUGH,
    messages=[{"role": "user", "content": "How is the weather in Paris?"}],
    tools=[tool],
    tool_choice={"type": "tool", "name": "get_weather"},
)
use = next(block for block in called.content if block.type == "tool_use")
assert use.name == "get_weather"
assert isinstance(use.input["city"], str)
assert called.stop_reason == "tool_use"
result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}
after = client.messages.create(
    model=MODEL,
    max_tokens=12,
    system="Be brief.",
    messages=[
        {"role": "user", "content": "How is the weather in Paris?"},
        {"role": "assistant", "content": [use.model_dump()]},
        {"role": "user", "content": [result]},
    ],
    tools=[tool],
)
assert after.stop_reason in ("end_turn", "max_tokens", "tool_use")

assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens > 0
try:
    client.messages.create(model="no-such-model", max_tokens=1, messages=ASK)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("a model that is not there was found")
