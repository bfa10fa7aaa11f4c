"""Ollama's API: the `ollama` SDK, unmodified, through the Go edge."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from weft.testing.services.dialect_edge import DialectEdge, dialect_edge
from weft.testing.services.gateway_harness import MODEL

pytestmark = pytest.mark.needs("go")

USER: list[Any] = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
}
FUNCTION = {"name": "get_weather", "description": "Tells.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'


@pytest.fixture
async def edge(rest_binary: Path, tmp_path: Path) -> AsyncIterator[DialectEdge]:
    async with dialect_edge(rest_binary, tmp_path) as made:
        yield made


@pytest.fixture
def client(edge: DialectEdge) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=edge.url, timeout=60)


async def both(client: ollama.AsyncClient, **fields: Any) -> ollama.ChatResponse:
    """The whole answer, which is what the streamed one comes to."""
    asked = {"model": MODEL, "messages": USER, **fields}
    whole = await client.chat(**asked)
    parts = [part async for part in await client.chat(**asked, stream=True)]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    for name in ("content", "thinking"):
        text = "".join([getattr(part.message, name) or "" for part in parts])
        assert text == (getattr(whole.message, name) or "")
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert calls == list(whole.message.tool_calls or ())
    assert parts[-1].done_reason == whole.done_reason
    assert parts[-1].eval_count == whole.eval_count
    return whole


async def test_a_chat_whole_and_streamed(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    edge.text = "Weft antwortet: déjà vu 你好 🎉\u2028done"
    answer = await both(client)
    assert answer.message.content == edge.text
    assert (answer.model, answer.message.role, answer.done) == (MODEL, "assistant", True)
    assert answer.done_reason == "stop"
    assert answer.prompt_eval_count == len(edge.mesh.workers[0].prompts[-1])
    assert answer.eval_count == len(edge.mesh.ids(edge.text)) + 1
    assert answer.total_duration is not None
    assert answer.eval_duration is not None
    assert 0 < answer.eval_duration <= answer.total_duration
    assert edge.prompt == "user: hi\nassistant:"
    # Streamed unless it is refused, and named as Ollama's clients name models.
    raw = await edge.post("/api/chat", {"model": f"{MODEL}:latest", "messages": USER})
    assert raw.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in raw.text.splitlines()]
    assert {line["model"] for line in lines} == {f"{MODEL}:latest"}
    assert lines[-1]["done"] is True


async def test_options_reach_the_worker(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    options = {
        "temperature": 0.25,
        "top_k": 7,
        "top_p": 0.5,
        "min_p": 0.125,
        "seed": 3,
        "repeat_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_predict": 4,
        "num_ctx": 2048,
        "stop": ["never"],
    }
    answer = await both(client, options=options, keep_alive="5m")
    assert answer.done_reason == "length"
    sampling = edge.submit.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.25, 7, 0.5)
    assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.125, 3, 1.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert edge.submit.stop.max_tokens == 4
    edge.text = "one two three"
    stopped = await both(client, options={"stop": [" thr"], "num_predict": -1})
    assert (stopped.message.content, stopped.done_reason) == ("one two", "stop")


async def test_reasoning_and_calls(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    edge.text = f"<think>\nhm\n</think>\n\nI look.\n{CALL}\n{CALL}"
    answer = await both(client, tools=TOOLS, think=True)
    message = answer.message
    assert (message.thinking or "").strip() == "hm"
    assert message.content == "I look."
    assert [call.function.arguments for call in message.tool_calls or ()] == [{"city": "Köln"}] * 2
    assert "thinking:True" in edge.prompt
    assert '"get_weather"' in edge.prompt
    history = [*USER, message, {"role": "tool", "tool_name": "get_weather", "content": "rain"}]
    await client.chat(model=MODEL, messages=history, tools=TOOLS, think=False)
    assert "thinking:False" in edge.prompt
    assert edge.prompt.count('<tool_call>get_weather {"city": "Köln"}') == 2
    assert edge.prompt.endswith("tool: rain\nassistant:")
    edge.text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Kö'
    cut = await both(client, tools=TOOLS)
    assert "Kö" in (cut.message.content or "")


async def test_forms_of_the_text(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    edge.text = '{"city": "Köln"}'
    answer = await both(client, format=SCHEMA)
    assert json.loads(answer.message.content or "") == {"city": "Köln"}
    assert json.loads(edge.submit.sampling.constraint.json_schema) == SCHEMA
    await both(client, format="json")
    assert edge.submit.sampling.HasField("constraint")


async def test_generations(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    edge.text = "<think>hm</think>Weft answers."
    answer = await client.generate(model=MODEL, prompt="hi", system="Be kind.")
    assert (answer.response, answer.thinking) == ("Weft answers.", "hm")
    assert edge.prompt == "system: Be kind.\nuser: hi\nassistant:"
    parts = [part async for part in await client.generate(model=MODEL, prompt="hi", stream=True)]
    assert "".join([part.response or "" for part in parts]) == "Weft answers."
    raw = await client.generate(model=MODEL, prompt="Once", raw=True)
    assert (raw.response, edge.prompt) == (edge.text, "Once")
    logprobs = await client.generate(model=MODEL, prompt="hi", raw=True, logprobs=True)
    assert logprobs.logprobs
    assert "".join([one.token for one in logprobs.logprobs]).startswith(edge.text)
    num_submits = len(edge.mesh.workers[0].submits)
    loaded = await client.generate(model=MODEL, prompt="")
    assert (loaded.done_reason, loaded.done) == ("load", True)
    assert (await client.chat(model=MODEL)).done_reason == "load"
    for nothing in (0, "0", "0s", "0m"):
        ended = await client.generate(model=MODEL, keep_alive=nothing)
        assert (ended.done_reason, ended.response, ended.done) == ("unload", "", True)
    assert (await client.chat(model=MODEL, keep_alive=0)).done_reason == "unload"
    assert (await client.chat(model=MODEL, keep_alive="10m")).done_reason == "load"
    assert len(edge.mesh.workers[0].submits) == num_submits


async def test_vectors_of_a_model_that_has_none(
    edge: DialectEdge, client: ollama.AsyncClient
) -> None:
    for path, field in (("/api/embed", "input"), ("/api/embeddings", "prompt")):
        refused = await edge.post(path, {"model": MODEL, field: "x"})
        assert (refused.status_code, refused.json().keys()) == (400, {"error"})
        missing = await edge.post(path, {"model": "other", field: "x"})
        assert (missing.status_code, missing.json().keys()) == (404, {"error"})
    # Without a text it only asks for the model to be loaded.
    assert (await client.embed(model=MODEL, input=[])).embeddings == []
    assert (await client.embeddings(model=MODEL, prompt="")).embedding == []


async def test_ollamas_default_window_of_a_penalty_is_left_out_and_told(edge: DialectEdge) -> None:
    options: dict[str, Any] = {"repeat_penalty": 1.1, "repeat_last_n": 64}
    body = {"model": MODEL, "messages": USER, "stream": False}
    answer = await edge.post("/api/chat", {**body, "options": options})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-weft-warnings"].startswith("options.repeat_last_n: left out")
    assert edge.submit.sampling.repetition_penalty == pytest.approx(1.1)
    for silent in ({"repeat_last_n": 64}, {**options, "repeat_last_n": -1}):
        answer = await edge.post("/api/chat", {**body, "options": silent})
        assert "x-weft-warnings" not in answer.headers, answer.headers


async def test_what_is_served(edge: DialectEdge, client: ollama.AsyncClient) -> None:
    assert [model.model for model in (await client.list()).models] == [MODEL]
    assert [model.model for model in (await client.ps()).models] == [MODEL]
    shown = await client.show(MODEL)
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    kind = shown.modelinfo["general.architecture"]
    assert shown.details is not None
    assert (kind, shown.details.family, shown.details.families) == ("llama", "llama", ["llama"])
    assert shown.modelinfo[f"{kind}.context_length"] == 4096
    with pytest.raises(ollama.ResponseError) as missing:
        await client.show("other")
    assert missing.value.status_code == 404
    # Ollama's own client shows twelve characters of the digest, and looks for a server here first.
    assert all(len(model.digest or "") == 64 for model in (await client.list()).models)
    assert (await edge.http.head(edge.url)).status_code == 200
    version = await edge.http.get(f"{edge.url}/api/version")
    assert version.json().keys() == {"version", "weft"}
    # VS Code's client, among others, asks for at least 0.6.4.
    assert tuple(map(int, version.json()["version"].split("."))) >= (0, 6, 4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"fromat": "json"}, "fromat"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"options": {"surprise": 1}}, "options.surprise"),
        ({"options": {"mirostat": 2}}, "options.mirostat"),
        ({"options": {"typical_p": 0.5}}, "options.typical_p"),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"repeat_penalty": 1.5, "repeat_last_n": 8}}, "options.repeat_last_n"),
        ({"options": {"stop": [""]}}, "options.stop"),
        ({"format": "yaml"}, "format"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["AA=="]}]},
            "messages[0].images",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "no spaces"}}]},
            "tools[0].function.name",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_is_named(
    edge: DialectEdge, fields: dict[str, Any], named: str, stream: bool
) -> None:
    body = {"model": MODEL, "messages": USER, "stream": stream, **fields}
    answer = await edge.post("/api/chat", body)
    assert answer.status_code == 400, answer.text
    assert answer.json().keys() == {"error"}
    assert answer.json()["error"].startswith(f"{named}:")


@pytest.mark.parametrize(
    ("path", "foreign"), [("/api/generate", "messages"), ("/api/chat", "prompt")]
)
async def test_fields_of_the_other_call_are_refused_by_their_names(
    edge: DialectEdge, path: str, foreign: str
) -> None:
    answer = await edge.post(path, {"model": MODEL, foreign: USER})
    assert (answer.status_code, answer.json()["error"].split(":")[0]) == (400, foreign)


async def test_failures_have_ollamas_shape(rest_binary: Path, tmp_path: Path) -> None:
    async with dialect_edge(
        rest_binary,
        tmp_path,
        template="{{ messages[0].content }}",
        max_attempts=1,
        resume_timeout_s=0,
    ) as edge:
        client = ollama.AsyncClient(host=edge.url, timeout=60)
        for name in ("suffix", "template"):
            refused = await edge.post("/api/generate", {"model": MODEL, "prompt": "x", name: "y"})
            assert refused.json()["error"].startswith(f"{name}:")
        with pytest.raises(ollama.ResponseError, match="does not reason"):
            await client.chat(model=MODEL, messages=USER, think=True)
        with pytest.raises(ollama.ResponseError) as missing:
            await client.chat(model="other", messages=USER)
        assert missing.value.status_code == 404
        unknown = await edge.http.get(f"{edge.url}/api/chat")
        assert (unknown.status_code, list(unknown.json())) == (405, ["error"])
        edge.break_after = 3
        parts = await client.chat(model=MODEL, messages=USER, stream=True)
        assert not (await anext(parts)).done
        with pytest.raises(ollama.ResponseError, match="lost"):
            [part async for part in parts]


async def test_more_tokens_than_there_is_room_for(
    edge: DialectEdge, client: ollama.AsyncClient
) -> None:
    edge.text, edge.is_cut, edge.chunk = "word " * 5000, True, 50
    answer = await client.chat(model=MODEL, messages=USER, options={"num_predict": 64000})
    assert answer.done_reason == "length"
    assert (answer.prompt_eval_count or 0) + (answer.eval_count or 0) == 4096
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(ollama.ResponseError, match="prompt too long; exceeded max context length"):
        await client.chat(model=MODEL, messages=long)


async def test_images_of_tool_results_become_a_text(edge: DialectEdge) -> None:
    result = {"role": "tool", "content": "seen", "images": ["AA=="]}
    body = {"model": MODEL, "messages": [*USER, result], "stream": False, "truncate": True}
    answer = await edge.post("/api/chat", body)
    assert answer.status_code == 200, answer.text
    assert "seen\n[The tool returned content of type image." in edge.prompt
    told = answer.headers["x-weft-warnings"]
    assert "messages[1].images: left out" in told
    assert "truncate: left out" in told
