"""Anthropic's client: a picture in a message, and a screenshot that a tool returned."""

import anthropic
from pictures import ANSWER, BARE, MODEL, QUESTION, is_named

client = anthropic.Anthropic(timeout=300)
source = {"type": "base64", "media_type": "image/jpeg", "data": BARE}
image = {"type": "image", "source": source}
ask = {"role": "user", "content": [image, {"type": "text", "text": QUESTION}]}
brief = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}
message = client.messages.create(messages=[ask], **brief)
assert message.content[0].text == ANSWER
counted = client.messages.count_tokens(model=MODEL, messages=[ask])
cached = message.usage.cache_read_input_tokens or 0
assert counted.input_tokens == message.usage.input_tokens + cached

call = {"type": "tool_use", "id": "a", "name": "screenshot", "input": {}}
result = {"type": "tool_result", "tool_use_id": "a", "content": [image]}
looked = client.messages.create(
    messages=[
        {"role": "user", "content": "Take a screenshot."},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": QUESTION}]},
    ],
    **brief,
)
assert is_named(looked.content[0].text)
