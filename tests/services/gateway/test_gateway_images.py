"""Requests with images, from each dialect's body to the tokens that a worker gets."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from PIL import Image
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import (
    ContextTooLong,
    InvalidRequest,
    Overloaded,
    PeerUnavailable,
    WeftError,
)
from weft.testing.models.tiny_images import (
    add_images,
    data_url,
    encoded,
    image_tokenizer,
    random_image,
)
from weft.testing.services.fake_decode import FakeWorker, Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2

WIDE = encoded(random_image(1, 120, 20))
"""One row of four tiles, and a whole."""
URL = data_url(WIDE)
BARE = URL.partition(",")[2]
WIDE_TEXT = (
    "".join(f"<fake_token_around_image><row_1_col_{n}>{'<image>' * 4}" for n in (1, 2, 3, 4))
    + f"\n\n<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
)
COARSE_TEXT = f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
PART = {"type": "image_url", "image_url": {"url": URL}}
LOW = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with serving(tmp_path) as harness:
        yield harness


def serving(
    folder: Path,
    *,
    change: Callable[[Path], None] = add_images,
    max_context_tokens: int = 2048,
    **settings: Any,
) -> Any:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[7, 8]])

    tokenizer = image_tokenizer()
    return gateway(
        folder,
        script,
        tokenizer=tokenizer,
        max_context_tokens=max_context_tokens,
        change_model=change,
        **settings,
    )


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def prompt_of(mesh: Harness, *messages: Any, **fields: Any) -> str:
    """The prompt that a chat makes, as text."""
    answer = await mesh.json("TokenizeText", {"messages": list(messages), **fields})
    return text_of(mesh, answer["tokens"])


def text_of(mesh: Harness, ids: list[int]) -> str:
    return str(mesh.tokenizer.decode(ids, skip_special_tokens=False))


async def chat(mesh: Harness, *messages: Any, **fields: Any) -> Any:
    body = {"messages": list(messages), "max_tokens": 2, **fields}
    return await mesh.json("ChatCompletions", body)


async def refusal(work: Awaitable[object]) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return from_rpc_error(caught.value)


def last_prompt(mesh: Harness) -> str:
    """What the worker was given last."""
    return text_of(mesh, mesh.workers[0].prompts[-1])


async def test_images_are_refused_where_no_worker_can_take_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeWorker, "lacks_encoder", True)
    async with serving(tmp_path) as mesh:
        error = await refusal(chat(mesh, user(PART)))
        assert isinstance(error, PeerUnavailable)
        assert "no worker can take images" in error.message
        await chat(mesh, user(text_part("one")))


async def test_parts_keep_their_order(mesh: Harness) -> None:
    text = await prompt_of(mesh, user(text_part("one"), PART, text_part("two"), LOW))
    assert text == (
        f"<|im_start|>User: one{WIDE_TEXT}two{COARSE_TEXT}<end_of_utterance>\nAssistant:"
    )


async def test_usage_prompts_and_tokenize_count_the_same_tokens(mesh: Harness) -> None:
    messages = [user(PART, text_part("what?")), {"role": "assistant", "content": "a"}, user(LOW)]
    answer = await chat(mesh, *messages)
    ids = mesh.workers[0].prompts[-1]
    counted = await mesh.json("TokenizeText", {"messages": messages})
    assert ids == counted["tokens"]
    assert answer["usage"]["prompt_tokens"] == len(ids) == counted["count"]
    assert last_prompt(mesh).count("<image>") == 6 * 4


async def test_workers_get_each_medium_once_and_the_places_of_all(mesh: Harness) -> None:
    await chat(mesh, user(PART, LOW, PART))
    await chat(mesh, user(text_part("again"), PART))
    (worker,) = mesh.workers
    form = mesh.app.model.images.form  # type: ignore[union-attr]
    with Image.open(io.BytesIO(WIDE)) as image:
        expected = {one.digest: one for one in form.process(image)}
        expected |= {one.digest: one for one in form.process(image, is_coarse=True)}
    assert worker.media == expected
    assert sorted(worker.arrivals) == sorted(expected)
    image_id = mesh.tokenizer.token_to_id("<image>")
    for prompt, submit in zip(worker.prompts, worker.submits, strict=True):
        places = [at for at, id_ in enumerate(prompt) if id_ == image_id]
        spans = submit.spans
        assert [at for one in spans for at in range(one.position, one.position + one.length)] == (
            places
        )
        assert {one.digest for one in spans} <= expected.keys()


@pytest.mark.parametrize("num_decode", [1, 2])
async def test_media_leave_before_the_route_only_where_it_has_no_choice(
    num_decode: int, tmp_path: Path
) -> None:
    """A request is refused for its second image, when its first has left or not."""
    damaged = {"type": "image_url", "image_url": {"url": data_url(WIDE[:200])}}
    async with serving(tmp_path, num_decode=num_decode, media_processes=1) as mesh:
        error = await refusal(chat(mesh, user(PART, damaged)))
        assert isinstance(error, InvalidRequest)
        if num_decode == 1:
            async with asyncio.timeout(30):
                while not mesh.workers[0].media:
                    await asyncio.sleep(0.01)
        await chat(mesh, user(text_part("a text")))
        num_found = sum(bool(worker.media) for worker in mesh.workers)
        assert num_found == (num_decode == 1)
        await chat(mesh, user(PART))
        arrivals = [digest for worker in mesh.workers for digest in worker.arrivals]
        assert arrivals
        assert len(arrivals) == len(set(arrivals))


async def test_spelled_image_tokens_are_text(mesh: Harness) -> None:
    image = mesh.tokenizer.token_to_id("<image>")
    spelled = "<image><fake_token_around_image><row_1_col_1>"
    for message in (user(text_part(spelled), PART, text_part(spelled)), user(PART)):
        await chat(mesh, {"role": "assistant", "content": spelled}, message)
        assert mesh.workers[0].prompts[-1].count(image) == 5 * 4
    await chat(mesh, {"role": "user", "content": spelled})
    assert image not in mesh.workers[0].prompts[-1]
    assert spelled in last_prompt(mesh)


async def test_text_alone_reaches_templates_that_read_parts_alone(mesh: Harness) -> None:
    await chat(mesh, {"role": "user", "content": "hello"})
    assert last_prompt(mesh) == "<|im_start|>User: hello<end_of_utterance>\nAssistant:"


async def test_a_template_that_leaves_an_image_out_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content[0].text }}{% endfor %}"
    async with serving(tmp_path, change=lambda it: add_images(it, template=template)) as mesh:
        error = await refusal(chat(mesh, user(text_part("x"), PART)))
    assert isinstance(error, InvalidRequest)
    assert "have 1 images, for which the model's chat template wrote 0 places" in error.message


async def test_prompts_that_are_too_long_are_refused_before_images_are_decoded(
    tmp_path: Path,
) -> None:
    square = data_url(encoded(random_image(1, 256, 256)))
    many = user(*[{"type": "image_url", "image_url": {"url": square}}] * 5)
    async with serving(tmp_path, max_context_tokens=300) as mesh:
        error = await refusal(chat(mesh, many))
        assert isinstance(error, ContextTooLong)
        assert "300 tokens, but the prompt has at least 5" in error.message
        assert mesh.app.images.num_images == 0


async def test_a_text_that_is_too_long_is_told_whatever_its_images_are(
    mesh: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    """Files are read while the text is tokenised."""
    bad = {"type": "image_url", "image_url": {"url": "ftp://a/b"}}
    for part in (PART, bad):
        error = await refusal(chat(mesh, user(text_part("word " * 40_000), part)))
        assert isinstance(error, ContextTooLong)
    assert "image" in (await refusal(chat(mesh, user(text_part("word"), bad)))).message
    await mesh.wait(lambda: not mesh.app.images.held.num_bytes)
    gc.collect()
    assert not [one for one in caplog.records if one.levelno >= logging.ERROR]


async def test_files_of_a_refused_request_are_free_with_its_answer(mesh: Harness) -> None:
    """Without the collector of cycles, which does not see how large something is."""
    large = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * (2 << 20)}"}}
    bad = {"type": "image_url", "image_url": {"url": "ftp://a/b"}}
    body = json.dumps({"messages": [user(large, bad)]}).encode()

    async def refused() -> None:
        assert "image" in (await refusal(mesh.post("ChatCompletions", body))).message

    await refused()
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(6):
            await refused()
        await mesh.wait(lambda: tracemalloc.get_traced_memory()[0] < len(body))
    finally:
        tracemalloc.stop()
        gc.enable()


async def test_other_urls_are_not_fetched(mesh: Harness) -> None:
    for url in ("http://127.0.0.1:1/a.png", "file:///etc/passwd", "ftp://a/b"):
        part = {"type": "image_url", "image_url": {"url": url}}
        error = await refusal(chat(mesh, user(PART, part)))
        assert error.param == "messages[0].content[1].image_url.url"
        assert error.http_status == 400
        result = {"role": "tool", "tool_call_id": "a", "content": [part, PART]}
        await chat(mesh, user(text_part("x")), result)
        assert "[The tool returned an image. It is a URL" in last_prompt(mesh)
        assert WIDE_TEXT in last_prompt(mesh)


async def test_urls_are_fetched_where_that_is_allowed(tmp_path: Path) -> None:
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        is_there = heads[-1].startswith(b"GET /wide.png ")
        status, data = ("200 OK", WIDE) if is_there else ("404 Not Found", b"")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    url = f"http://{host}/wide.png"
    async with server, serving(tmp_path, media_private_hosts=[host]) as mesh:
        part = {"type": "image_url", "image_url": {"url": url}}
        gone = {"type": "image_url", "image_url": {"url": f"http://{host}/gone.png"}}
        result = {"role": "tool", "tool_call_id": "a", "content": [gone, part]}
        await chat(mesh, user(part, text_part("what?")), result)
        assert f"User:{WIDE_TEXT}what?<end" in last_prompt(mesh)
        text = "[The tool returned an image. It was answered with status 404.]"
        assert f"{text}{WIDE_TEXT}" in last_prompt(mesh)
        assert len(heads) == 2
        error = await refusal(chat(mesh, user(gone)))
        assert (error.http_status, error.param) == (400, "messages[0].content[0].image_url.url")
        item = user({"type": "input_image", "image_url": url})
        await mesh.dialect("Responses", "CreateResponse", {"input": [item]})
        assert f"User:{WIDE_TEXT}<end" in last_prompt(mesh)
        block = {"type": "image", "source": {"type": "url", "url": url}}
        messages = [user(block, text_part("two"))]
        body = {"max_tokens": 2, "messages": messages}
        await mesh.dialect("Anthropic", "CreateMessage", body)
        assert f"User:{WIDE_TEXT}two<end" in last_prompt(mesh)
        counted = await mesh.dialect("Anthropic", "CountTokens", {"messages": messages})
        assert counted["input_tokens"] == len(mesh.workers[0].prompts[-1])
        image = gateway_pb2.ImageFile(url=url)
        parts = [gateway_pb2.ContentPart(image=image), gateway_pb2.ContentPart(text="three")]
        message = gateway_pb2.ChatMessage(role="user", parts=parts)
        typed = gateway_pb2.ChatRequest(messages=[message])
        typed.stop.max_tokens = 2
        async for _ in mesh.typed.Chat(typed):
            pass
        assert f"User:{WIDE_TEXT}three<end" in last_prompt(mesh)
        await mesh.wait(lambda: not mesh.app.images.held.num_bytes)
        outside = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/wide.png"}}
        error = await refusal(chat(mesh, user(outside)))
        assert "port 1, which is not among --media-url-hosts" in error.message


async def test_anthropics_blocks(mesh: Harness) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": BARE}
    block = {"type": "image", "source": source}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text_part("seen"), block]}
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    body = {
        "max_tokens": 2,
        "messages": [
            user(text_part("one"), block, text_part("two")),
            {"role": "assistant", "content": [call]},
            user(result),
        ],
    }
    await mesh.dialect("Anthropic", "CreateMessage", body)
    text = last_prompt(mesh)
    assert f"User: one{WIDE_TEXT}two<end" in text
    assert f"<tool_response>\nseen{WIDE_TEXT}\n</tool_response>" in text
    counted = await mesh.dialect("Anthropic", "CountTokens", {"messages": body["messages"]})
    assert counted["input_tokens"] == len(mesh.workers[0].prompts[-1])
    block = {"type": "image", "source": {"type": "url", "url": "https://example.com/a"}}
    error = await refusal(
        mesh.dialect("Anthropic", "CreateMessage", {"max_tokens": 2, "messages": [user(block)]})
    )
    assert error.param == "messages[0].content[0].source.url"
    block = {"type": "image", "source": {"type": "file", "file_id": "file_011"}}
    error = await refusal(
        mesh.dialect("Anthropic", "CreateMessage", {"max_tokens": 2, "messages": [user(block)]})
    )
    assert error.param == "messages[0].content[0].source.type"
    assert "base64" in error.message


async def test_responses_items_and_conversations(mesh: Harness) -> None:
    part = {"type": "input_image", "image_url": URL}
    call = {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "seen"}, part]
    given = [
        user({"type": "input_text", "text": "one"}, part, {**part, "detail": "low"}),
        call,
        {"type": "function_call_output", "call_id": "a", "output": output},
    ]
    first = await mesh.dialect(
        "Responses", "CreateResponse", {"input": given, "max_output_tokens": 2}
    )
    text = last_prompt(mesh)
    assert f"User: one{WIDE_TEXT}{COARSE_TEXT}<end" in text
    assert f"<tool_response>\nseen{WIDE_TEXT}\n</tool_response>" in text
    body = {
        "input": [user(part)],
        "previous_response_id": first["id"],
        "max_output_tokens": 2,
    }
    await mesh.dialect("Responses", "CreateResponse", body)
    assert last_prompt(mesh).startswith(text)
    assert last_prompt(mesh).endswith(f"User:{WIDE_TEXT}<end_of_utterance>\nAssistant:")


async def test_ollamas_images_are_ahead_of_the_text(mesh: Harness) -> None:
    body = {
        "stream": False,
        "options": {"num_predict": 2},
        "messages": [{"role": "user", "content": "what?", "images": [BARE]}],
    }
    await mesh.dialect("Ollama", "Chat", body)
    expected = f"<|im_start|>User:{WIDE_TEXT}what?<end_of_utterance>\nAssistant:"
    assert last_prompt(mesh) == expected
    body = {"stream": False, "prompt": "what?", "images": [BARE], "options": {"num_predict": 2}}
    await mesh.dialect("Ollama", "Generate", body)
    assert last_prompt(mesh) == expected
    error = await refusal(mesh.dialect("Ollama", "Generate", {**body, "images": [BARE, "#"]}))
    assert error.param == "images[1]"


async def test_typed_parts(mesh: Harness) -> None:
    parts = [
        gateway_pb2.ContentPart(text="one"),
        gateway_pb2.ContentPart(image=gateway_pb2.ImageFile(data=WIDE)),
        gateway_pb2.ContentPart(image=gateway_pb2.ImageFile(data=WIDE, coarse=True)),
    ]
    message = gateway_pb2.ChatMessage(role="user", parts=parts)
    request = gateway_pb2.ChatRequest(messages=[message])
    request.stop.max_tokens = 2
    async for _ in mesh.typed.Chat(request):
        pass
    assert f"User: one{WIDE_TEXT}{COARSE_TEXT}<end" in last_prompt(mesh)
    counted = await mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(messages=[message]))
    assert list(counted.tokens.ids) == mesh.workers[0].prompts[-1]
    for wrong, param in (
        (gateway_pb2.ContentPart(), "messages[0].parts[3]"),
        (gateway_pb2.ContentPart(image=gateway_pb2.ImageFile()), "messages[0].parts[3].image"),
        *(
            (gateway_pb2.ContentPart(image=image), "messages[0].parts[3].image.url")
            for image in (
                gateway_pb2.ImageFile(url="http://127.0.0.1:1/a.png"),
                gateway_pb2.ImageFile(url=URL, data=WIDE),
                gateway_pb2.ImageFile(url="wide.png"),
            )
        ),
    ):
        request.messages[0].parts.append(wrong)

        async def work() -> None:
            async for _ in mesh.typed.Chat(request):
                pass

        assert (await refusal(work())).param == param
        del request.messages[0].parts[3]
    request.messages[0].content = "two"
    assert (await refusal(work())).param == "messages[0].parts"


async def test_damaged_files_are_400(mesh: Harness) -> None:
    for data in (b"", b"no image", WIDE[:100], WIDE[:40] + bytes(500)):
        part = {"type": "image_url", "image_url": {"url": data_url(data)}}
        error = await refusal(chat(mesh, user(part)))
        assert (error.http_status, error.param) == (400, "messages[0].content[0].image_url.url")


async def test_damaged_images_of_tools_become_a_text(mesh: Harness) -> None:
    bad = [
        {"type": "image_url", "image_url": {"url": url}}
        for url in (data_url(b"<svg/>", "image/svg+xml"), "data:,x", data_url(WIDE[:150]))
    ]
    content = [text_part("seen"), bad[0], PART, bad[1], bad[2]]
    result = {"role": "tool", "tool_call_id": "a", "content": content}
    messages = [user(LOW), result]
    answer = await chat(mesh, *messages)
    text = last_prompt(mesh)
    told = text.split("[The tool returned an image. ")[1:]
    assert [piece.partition("]")[0] for piece in told] == [
        "It is no image that can be read; give one of JPEG, PNG, WEBP, GIF.",
        "It must have the form data:image/...;base64,....",
        "It is damaged or cut off: it begins as PNG, but its pixels cannot be decoded.",
    ]
    assert f"GIF.]{WIDE_TEXT}[The tool" in text
    assert f"User:{COARSE_TEXT}<end" in text
    assert answer["usage"]["prompt_tokens"] == len(mesh.workers[0].prompts[-1])
    error = await refusal(chat(mesh, user(bad[0]), result))
    assert error.param == "messages[0].content[0].image_url.url"


async def test_models_whose_images_are_not_served_say_why(tmp_path: Path) -> None:
    change = partial(add_images, image_processor_type="OddProcessor")
    async with serving(tmp_path, change=change) as mesh:
        error = await refusal(chat(mesh, user(PART)))
        assert error.param == "messages[0].content[0].type"
        assert "OddProcessor" in error.message
        result = {"role": "tool", "tool_call_id": "a", "content": [text_part("seen"), PART]}
        await chat(mesh, user(text_part("x")), result)
        assert "seen\n[The tool returned content of type image_url." in last_prompt(mesh)


async def test_bodies_have_room_for_images(mesh: Harness) -> None:
    noise = encoded(random_image(3, 2200, 2200), "PNG", compress_level=0)
    assert len(noise) * 4 // 3 > 18 << 20  # more than bodies of text, and than gRPC's own default
    part = {"type": "image_url", "image_url": {"url": data_url(noise)}}
    answer = await chat(mesh, user(part))
    assert answer["usage"]["prompt_tokens"] > 0


async def test_requests_hold_a_bounded_amount_of_images(tmp_path: Path) -> None:
    async with serving(tmp_path, media_held_bytes=80_000) as mesh:
        mesh.workers[0].script = lambda submit, prompt: Script(tokens=[[7, 8]], hang_after=0)
        first = asyncio.create_task(chat(mesh, user(PART)))
        await mesh.wait(lambda: mesh.workers[0].submits)
        error = await refusal(chat(mesh, user(PART)))
        assert isinstance(error, Overloaded)
        assert error.message.startswith("files of requests hold")
        assert mesh.app.images.held.num_bytes > 0
        first.cancel()
        await mesh.wait(lambda: not mesh.app.images.held.num_bytes)


async def test_metrics_count_images(mesh: Harness) -> None:
    def value(name: str, **labels: str) -> float | None:
        return mesh.app.metrics.registry.get_sample_value(name, labels)

    for _ in range(3):
        await chat(mesh, user(PART))
    assert value("weft_images_total", source="decoded") == 1
    assert value("weft_images_total", source="memo") == 2
    assert value("weft_media_jobs", state="running") == 0
    assert value("weft_media_bytes", holder="memo") == mesh.app.images.memo.num_bytes > 0
    await mesh.wait(lambda: value("weft_media_bytes", holder="requests") == 0)


async def test_details_are_checked(mesh: Harness) -> None:
    for detail in ("auto", "high"):
        await chat(mesh, user({"type": "image_url", "image_url": {"url": URL, "detail": detail}}))
        assert WIDE_TEXT in last_prompt(mesh)
    part = {"type": "image_url", "image_url": {"url": URL, "detail": "ultra"}}
    error = await refusal(chat(mesh, user(part)))
    assert error.param == "messages[0].content[0].image_url.detail"


async def test_ollamas_clients_see_that_the_model_takes_images(mesh: Harness) -> None:
    shown = await mesh.dialect("Ollama", "ShowModel", {"model": MODEL})
    assert "vision" in shown["capabilities"]
