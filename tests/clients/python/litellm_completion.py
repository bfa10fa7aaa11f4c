"""LiteLLM: completions over OpenAI's and Anthropic's APIs, streams, a tool."""

import litellm
from settings import ENOUGH, MODEL, QUESTION, URL, WEATHER

litellm.telemetry = False
ASK = [{"role": "user", "content": QUESTION}]
BASES = {
    f"openai/{MODEL}": f"{URL}/v1",
    f"hosted_vllm/{MODEL}": f"{URL}/v1",
    f"anthropic/{MODEL}": URL,
}
for name, base in BASES.items():
    options = {
        "model": name,
        "api_base": base,
        "api_key": "none",
        "max_tokens": 12,
        "temperature": 0,
    }
    answer = litellm.completion(messages=ASK, **options)
    text = answer.choices[0].message.content
    assert text
    chunks = litellm.completion(messages=ASK, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    options["max_tokens"] = ENOUGH
    called = litellm.completion(
        messages=ASK,
        tools=[{"type": "function", "function": WEATHER}],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        **options,
    )
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
