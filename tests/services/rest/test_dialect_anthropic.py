"""Anthropic's Messages API: the `anthropic` SDK, unmodified, through the Go edge."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from weft.gateway.admission.keys import new_key, write_keys
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL

pytestmark = pytest.mark.needs("go")

USER: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
TOOLS: list[Any] = [{"name": "get_weather", "description": "Tells it.", "input_schema": SCHEMA}]
ARGUMENTS = '{"city": "Köln"}'
CALL = f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>'
BASIC: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": USER}
IMAGE = {"type": "base64", "media_type": "image/png", "data": "AA=="}


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[DialectEdge]:
    async with dialect_edge(rest_binary, tmp_path) as made:
        yield made


@pytest.fixture
async def client(edge: DialectEdge) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=edge.url, api_key="none", max_retries=0, timeout=60
    ) as made:
        yield made


async def both(client: anthropic.AsyncAnthropic, **fields: Any) -> anthropic.types.Message:
    """The whole answer, which is what the SDK makes of the streamed one too."""
    whole = await client.messages.create(**{**BASIC, **fields})
    anthropic.types.Message.model_validate(whole.to_dict(), strict=True)
    async with client.messages.stream(**{**BASIC, **fields}) as stream:
        kinds = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    for message in (whole, streamed):
        message.id = ""
        for block in message.content:
            if block.type == "tool_use":
                assert block.id
                block.id = ""
    told, found = whole.to_dict(), streamed.to_dict()
    for one in (told, found):
        one.pop("usage", None)
        for block in one["content"]:  # type: ignore[attr-defined]
            block.pop("parsed_output", None)
    assert told == found
    return whole


async def test_a_text_whole_and_streamed(edge: DialectEdge, client: Any) -> None:
    edge.text = "Weft antwortet: déjà vu 你好 🎉\u2028done"
    message = await both(client, system=[{"type": "text", "text": "Be\nkind."}])
    (block,) = message.content
    assert (block.type, block.text) == ("text", edge.text)
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.model == MODEL
    usage = message.usage
    assert usage.output_tokens == len(edge.mesh.ids(edge.text)) + 1
    assert usage.cache_read_input_tokens is not None
    prompt = edge.mesh.workers[0].prompts[-1]
    assert usage.input_tokens + usage.cache_read_input_tokens == len(prompt)
    assert edge.prompt == "thinking:False\nsystem: Be\nkind.\nuser: hi\nassistant:"
    counted = await client.messages.count_tokens(model=MODEL, messages=USER, system="Be\nkind.")
    assert counted.input_tokens == len(prompt)
    raw = await client.messages.with_raw_response.create(**BASIC)
    assert raw.headers["request-id"] == (await raw.parse()).id


async def test_events_come_in_order_with_their_names(edge: DialectEdge) -> None:
    edge.text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}"
    answer = await edge.post("/v1/messages", {**BASIC, "tools": TOOLS, "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, end = answer.text.split("\n\n")
    assert end == ""
    parsed = []
    for event in events:
        first, second = event.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        parsed.append(data)
    kinds = [data["type"] for data in parsed]
    starts = [i for i, kind in enumerate(kinds) if kind == "content_block_start"]
    assert [parsed[i]["content_block"]["type"] for i in starts] == ["thinking", "text", "tool_use"]
    for number, place in enumerate(starts):
        mine = [data for data in parsed if data.get("index") == number]
        assert parsed[place : place + len(mine)] == mine
        assert mine[-1]["type"] == "content_block_stop"
    deltas = [data["delta"]["type"] for data in parsed if data["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "text_delta", "input_json_delta"]
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert parsed[-2]["delta"]["stop_reason"] == "tool_use"


async def test_thinking_in_and_out(edge: DialectEdge, client: Any) -> None:
    edge.text = "<think>\nhm\n</think>\n\nSo it is."
    message = await both(client, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.content[0].thinking.strip() == "hm"
    assert message.content[1].text == "So it is."
    assert edge.prompt.startswith("thinking:True\n")
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens < message.usage.output_tokens
    again = [*USER, {"role": "assistant", "content": message.content}, *USER]
    await client.messages.create(**{**BASIC, "messages": again})
    assert "assistant: (" in edge.prompt
    assert "hm" in edge.prompt


async def test_tools_are_called_and_their_results_read(edge: DialectEdge, client: Any) -> None:
    edge.text = f"I look.\n{CALL}\n{CALL}"
    message = await both(client, tools=TOOLS)
    assert [block.type for block in message.content] == ["text", "tool_use", "tool_use"]
    assert message.content[1].input == {"city": "Köln"}
    assert message.stop_reason == "tool_use"
    one = await both(
        client, tools=TOOLS, tool_choice={"type": "auto", "disable_parallel_tool_use": True}
    )
    assert [block.type for block in one.content] == ["text", "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": "call_1",
            "content": [{"type": "text", "text": "rain", "cache_control": {"type": "ephemeral"}}],
        },
        {"type": "text", "text": "and now?"},
    ]
    use = {"type": "tool_use", "id": "call_1", "name": "get_weather", "input": {"city": "Köln"}}
    history = [
        *USER,
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": results},
    ]
    await client.messages.create(**{**BASIC, "messages": history, "tools": TOOLS})
    assert edge.prompt.endswith(
        'assistant: <tool_call>get_weather {"city": "Köln"} call_1</tool_call>\n'
        "tool: rain #call_1\nuser: and now?\nassistant:"
    )


async def test_a_tool_may_be_forced(edge: DialectEdge, client: Any) -> None:
    edge.text = ARGUMENTS
    named = {"type": "tool", "name": "get_weather"}
    message = await both(client, tools=TOOLS, tool_choice=named)
    (block,) = message.content
    assert (block.type, block.name, block.input) == ("tool_use", "get_weather", {"city": "Köln"})
    assert message.stop_reason == "tool_use"
    assert "Köln" not in edge.submit.sampling.constraint.json_schema
    assert edge.submit.sampling.HasField("constraint")
    edge.text = f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]'
    message = await both(client, tools=TOOLS, tool_choice={"type": "any"})
    assert [block.type for block in message.content] == ["tool_use"]
    edge.text = "no"
    message = await both(client, tools=TOOLS, tool_choice={"type": "none"})
    assert "tools:" not in edge.prompt
    assert message.stop_reason == "end_turn"


async def test_stops_and_limits(edge: DialectEdge, client: Any) -> None:
    edge.text = "one two three"
    message = await both(client, stop_sequences=["never", " thr"])
    assert message.content[0].text == "one two"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", " thr")
    message = await both(client, max_tokens=2)
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 2


async def test_sampling_reaches_the_worker(edge: DialectEdge, client: Any) -> None:
    await client.messages.create(
        **BASIC, extra_body={"temperature": 0.25, "top_p": 0.5, "top_k": 7}
    )
    sampling = edge.submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.25, 0.5, 7)


async def test_a_last_message_of_the_assistant_is_continued(edge: DialectEdge, client: Any) -> None:
    history = [*USER, {"role": "assistant", "content": "I am"}]
    await client.messages.create(**{**BASIC, "messages": history})
    assert edge.prompt.endswith("assistant: I am")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "temprature"),
        ({"options": {"seed": 1}}, "options"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"tool_choice": {"type": "auto", "Name": "x"}}, "tool_choice.Name"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": IMAGE}]}]},
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type",
        ),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "no spaces"}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        (
            {
                "tools": [{"name": "x", "input_schema": {"type": "array"}}],
                "tool_choice": {"type": "any"},
            },
            "tools[0].input_schema.type",
        ),
        ({"tools": [{"name": "x", "parameters": SCHEMA}]}, "tools[0].parameters"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "x"}, "container"),
        (
            {"thread": {"type": "continue", "previous_message_id": "x"}},
            "thread.previous_message_id",
        ),
        (
            {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
            "context_management.edits[0].type",
        ),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
async def test_what_is_refused_is_named(
    edge: DialectEdge, fields: dict[str, Any], named: str
) -> None:
    body = {name: value for name, value in {**BASIC, **fields}.items() if value is not None}
    answer = await edge.post("/v1/messages", body)
    assert answer.status_code == 400, answer.text
    told = answer.json()
    assert told.keys() == {"type", "error", "request_id"}
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"].startswith(f"{named}:"), told
    assert told["request_id"] == answer.headers["request-id"]


async def test_failures_are_the_sdks_own_errors(edge: DialectEdge, client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await client.messages.create(**{**BASIC, "model": "other"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    long: list[Any] = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError) as too_long:
        await client.messages.create(**{**BASIC, "messages": long})
    told = re.search(r"prompt is too long: (\d+) tokens > (\d+) maximum", str(too_long.value))
    assert told is not None
    assert int(told[1]) > int(told[2]) == 4096
    for method, status in (("GET", 405), ("POST", 413)):
        content = bytes(9 << 20) if method == "POST" else None
        answer = await edge.http.request(method, f"{edge.url}/v1/messages", content=content)
        assert (answer.status_code, answer.json()["type"]) == (status, "error")
        assert answer.json()["request_id"] == answer.headers["request-id"]
    unknown = await edge.http.get(f"{edge.url}/v1/messages/batches")
    assert unknown.json()["error"]["type"] == "not_found_error"


async def test_a_failure_in_mid_stream_is_an_event(rest_binary: Path, tmp_path: Path) -> None:
    async with dialect_edge(rest_binary, tmp_path, max_attempts=1, resume_timeout_s=0) as edge:
        edge.break_after = 3
        answer = await edge.post("/v1/messages", {**BASIC, "stream": True})
        assert answer.status_code == 200
        last = answer.text.rstrip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        told = json.loads(last.partition("data: ")[2])
        assert told["type"] == "error"
        assert told["error"]["type"] in ("overloaded_error", "api_error")
        async with anthropic.AsyncAnthropic(
            base_url=edge.url, api_key="none", max_retries=0
        ) as client:
            stream = await client.messages.create(**BASIC, stream=True)
            with pytest.raises(anthropic.APIStatusError):
                [event async for event in stream]


async def test_keys_may_come_as_x_api_key(rest_binary: Path, tmp_path: Path) -> None:
    key, entry = new_key("tenant")
    write_keys(tmp_path / "keys.json", [entry])
    async with dialect_edge(
        rest_binary, tmp_path, wait=False, api_keys_file=tmp_path / "keys.json"
    ) as edge:
        await edge.mesh.ready()
        async with anthropic.AsyncAnthropic(
            base_url=edge.url, api_key=key, max_retries=0
        ) as client:
            assert (await client.messages.create(**BASIC)).role == "assistant"
        async with anthropic.AsyncAnthropic(
            base_url=edge.url, api_key="wrong", max_retries=0
        ) as client:
            with pytest.raises(anthropic.AuthenticationError) as refused:
                await client.messages.create(**BASIC)
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


LEFT_OUT: list[tuple[dict[str, Any], str]] = [
    ({"context_management": {"edits": []}}, ""),
    (
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
        "context_management.edits[0]",
    ),
    ({"thread": {"type": "create"}}, "thread"),
    ({"speed": "fast"}, "speed"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9, "display": "omitted"}}, "display"),
    ({"tools": [*TOOLS, {"type": "web_search_20250305", "name": "w", "max_uses": 8}]}, "tools[1]"),
    ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "x"}, *TOOLS]}, "tools[0]"),
    ({"tools": TOOLS, "mcp_servers": [{"type": "url", "url": "x", "name": "y"}]}, "mcp_servers"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tools": [{**TOOLS[0], "newest_of_fields": [1]}]}, "tools[0].newest_of_fields"),
    ({"newest_of_fields": {"a": 1}}, "newest_of_fields"),
]


@pytest.mark.parametrize(("fields", "named"), LEFT_OUT)
async def test_what_the_model_can_do_without_is_left_out(
    edge: DialectEdge, fields: dict[str, Any], named: str
) -> None:
    """Agents send these unasked. The prompt is the same as without them."""
    plain = {name: value for name, value in fields.items() if name == "thinking"}
    plain |= {"tools": TOOLS} if "tools" in fields else {}
    await edge.post("/v1/messages", {**BASIC, **plain})
    prompt = edge.prompt
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        body = {**BASIC, **fields}
        if path.endswith("count_tokens"):
            del body["max_tokens"]
        answer = await edge.post(path, body)
        assert answer.status_code == 200, answer.text
        assert edge.prompt == prompt
        told = answer.headers.get("x-weft-warnings", "")
        assert (f"{named}: left out" in told) if named else not told


async def test_warnings_of_a_large_body_are_told(edge: DialectEdge) -> None:
    """Large bodies are parsed in a thread of their own."""
    body = {"model": MODEL, "messages": USER, "newest": "x" * (100 << 10)}
    answer = await edge.post("/v1/messages/count_tokens", body)
    assert "newest: left out" in answer.headers["x-weft-warnings"]


async def test_older_thinking_is_cleared(edge: DialectEdge) -> None:
    def turn(text: str, use: str = "") -> list[Any]:
        called = [{"type": "tool_use", "id": use, "name": "x", "input": {}}] if use else []
        thought = [{"type": "thinking", "thinking": text, "signature": ""}]
        return [{"role": "assistant", "content": [*thought, *called]}]

    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1"}]}
    history = [*USER, *turn("old"), *USER, *turn("first", "1"), result, *turn("then"), *USER]
    edit: dict[str, Any] = {"type": "clear_thinking_20251015"}
    for keep, shown in (
        (None, ["first", "then"]),
        ({"type": "thinking_turns", "value": 1}, ["first", "then"]),
        ({"type": "thinking_turns", "value": 2}, ["old", "first", "then"]),
        ({"type": "all"}, ["old", "first", "then"]),
    ):
        edits = [edit if keep is None else {**edit, "keep": keep}]
        answer = await edge.post(
            "/v1/messages",
            {**BASIC, "messages": history, "context_management": {"edits": edits}},
        )
        assert answer.status_code == 200, answer.text
        assert [word for word in ("old", "first", "then") if f"({word})" in edge.prompt] == shown


async def test_more_tokens_than_there_is_room_for(edge: DialectEdge, client: Any) -> None:
    """Agents always ask for 32,000 or 64,000."""
    edge.text, edge.is_cut, edge.chunk = "word " * 5000, True, 50
    raw = await client.messages.with_raw_response.create(**{**BASIC, "max_tokens": 64000})
    message = await raw.parse()
    assert message.stop_reason == "model_context_window_exceeded"
    usage = message.usage
    assert usage.cache_read_input_tokens is not None
    read = usage.input_tokens + usage.cache_read_input_tokens
    assert read + usage.output_tokens == 4096
    assert f"max_tokens: lowered to {usage.output_tokens}" in raw.headers["x-weft-warnings"]
    edge.is_cut, edge.text = False, "Short."
    assert (
        await client.messages.create(**{**BASIC, "max_tokens": 64000})
    ).stop_reason == "end_turn"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_every_answer_has_a_request_id(rest_binary: Path, tmp_path: Path, path: str) -> None:
    async with dialect_edge(rest_binary, tmp_path) as edge:
        limit = {"max_tokens": 9} if path == "/v1/messages" else {}
        good = await edge.post(path, {"model": MODEL, "messages": USER, **limit})
        assert good.headers["request-id"].startswith("msg_")
        assert good.json().get("id", good.headers["request-id"]) == good.headers["request-id"]
        bad = await edge.post(path, {"model": MODEL, "messages": [], **limit})
        assert bad.status_code == 400
        assert bad.json()["request_id"] == bad.headers["request-id"]
        assert bad.headers["request-id"].startswith("msg_")
        unknown = await edge.post(f"{path}/x", {})
        assert unknown.status_code == 404
        assert unknown.json()["request_id"] == unknown.headers["request-id"]
        assert unknown.headers["request-id"] == unknown.headers["x-request-id"]
    async with dialect_edge(rest_binary, tmp_path, edge_flags=("--max-body-bytes", "9")) as edge:
        large = await edge.post(path, {"model": MODEL})
        assert large.status_code == 413
        assert large.json()["request_id"] == large.headers["request-id"]


async def test_images_of_tool_results_become_a_text(edge: DialectEdge) -> None:
    for kind in ("image", "document", "block_of_next_year"):
        parts = [{"type": "text", "text": "seen"}, {"type": kind, "source": IMAGE}]
        result = {"type": "tool_result", "tool_use_id": "1", "content": parts}
        use = {"type": "tool_use", "id": "1", "name": "x", "input": {}}
        history = [*USER, {"role": "assistant", "content": [use]}]
        body = {**BASIC, "messages": [*history, {"role": "user", "content": [result]}]}
        answer = await edge.post("/v1/messages", body)
        assert answer.status_code == 200, answer.text
        assert f"seen\n[The tool returned content of type {kind}." in edge.prompt
        place = "messages[2].content[0].content[1]"
        assert f"{place}: left out" in answer.headers["x-weft-warnings"]
