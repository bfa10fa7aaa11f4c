"""OpenAI's client: a picture in a chat, in a stream, in a response, and in a tool's result."""

import openai
from pictures import ANSWER, DATA_URL, MODEL, QUESTION, is_named

client = openai.OpenAI(timeout=300)
content = [
    {"type": "image_url", "image_url": {"url": DATA_URL}},
    {"type": "text", "text": QUESTION},
]
ask = [{"role": "user", "content": content}]
brief = {"model": MODEL, "max_completion_tokens": 24, "temperature": 0}
chat = client.chat.completions.create(messages=ask, **brief)
assert chat.choices[0].message.content == ANSWER
assert chat.usage.prompt_tokens > 64
streamed = "".join(
    chunk.choices[0].delta.content or ""
    for chunk in client.chat.completions.create(messages=ask, stream=True, **brief)
    if chunk.choices
)
assert streamed == ANSWER

parts = [
    {"type": "input_image", "image_url": DATA_URL, "detail": "auto"},
    {"type": "input_text", "text": QUESTION},
]
brief = {"model": MODEL, "max_output_tokens": 24, "temperature": 0}
response = client.responses.create(input=[{"role": "user", "content": parts}], **brief)
assert response.output_text == ANSWER
looked = client.responses.create(
    input=[
        {"role": "user", "content": "Take a screenshot."},
        {"type": "function_call", "call_id": "a", "name": "screenshot", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": parts[:1]},
        {"role": "user", "content": QUESTION},
    ],
    **brief,
)
assert is_named(looked.output_text)
