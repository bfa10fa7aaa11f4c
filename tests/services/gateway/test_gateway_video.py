"""Chats with videos, from the body to the tokens and media that a worker gets."""

from __future__ import annotations

import asyncio
import base64
import random
import re
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import InvalidRequest
from weft.gateway.media import containers
from weft.testing.models.tiny_qwen_vl import END, IDS, MARKS, SQUARE, START, VIDEO
from weft.testing.models.tiny_video import add_video, video
from weft.testing.models.tiny_vision import write_marked_tokenizer
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_marked_tokenizer(folder, 480, MARKS, "", "<|im_end|>")
    found = Tokenizer.from_file(str(folder / "tokenizer.json"))
    # So that it has as many tokens as the model.
    found.add_tokens(["<spare>"])
    return found


def serving(folder: Path, tokenizer: Tokenizer, kind: str, **settings: Any) -> Any:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[7, 8]])

    return gateway(
        folder / "mesh",
        script,
        tokenizer=tokenizer,
        max_context_tokens=4096,
        change_model=partial(add_video, kind=kind),
        **settings,
    )


def url(data: bytes) -> str:
    return f"data:video/mp4;base64,{base64.b64encode(data).decode()}"


async def chat(mesh: Harness, *parts: Any) -> Any:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 2}
    return await mesh.json("ChatCompletions", body)


def part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(data)}}


SECONDS = re.compile(r"<(\d+\.\d) seconds><\|vision_start\|>((?:<\|video_pad\|>)+)<\|vision_end\|>")


async def test_frames_and_times_reach_the_worker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    film = video(40, Fraction(10), (32, 24))
    text = {"type": "text", "text": "What is it?"}
    async with serving(tmp_path, tokenizer, "qwen3_vl") as mesh:
        answer = await chat(mesh, part(film), text)
        await chat(mesh, part(film))
        (first, _), media = mesh.workers[0].submits, mesh.workers[0].media
        prompt = tokenizer.decode(mesh.workers[0].prompts[0], skip_special_tokens=False)
        assert mesh.app.images.videos.pids
        assert not mesh.app.images.pool.pids
        assert mesh.app.images.memo.num_bytes
    found = SECONDS.findall(prompt)
    # 8 of 40 frames, 10 a second.
    assert [time for time, _ in found] == ["0.3", "1.4", "2.5", "3.6"]
    spans = first.spans
    assert [span.length for span in spans] == [len(pads) // len(VIDEO) for _, pads in found]
    assert answer["usage"]["prompt_tokens"] == len(mesh.workers[0].prompts[0])
    assert "user\n<0.3 seconds>" in prompt
    assert "<|vision_end|>What is it?" in prompt
    for span in spans:
        height, width, channels = span.shape
        assert (channels, span.time) == (6, 0)
        assert height * width == span.length * SQUARE**2
        assert len(media[span.digest].data) == height * width * channels


async def test_times_of_qwen_2_5_are_positions(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serving(tmp_path, tokenizer, "qwen2_5_vl") as mesh:
        await chat(mesh, part(video(40, Fraction(10), (32, 24))))
        prompt, (submit,) = mesh.workers[0].prompts[0], mesh.workers[0].submits
    spans = list(submit.spans)
    assert prompt.count(IDS[START]) == 1
    # 4 positions a second, and half a second to a frame.
    assert [span.time for span in spans] == [0, *(4 * number + 1 for number in (1, 2, 3))]
    assert [span.position for span in spans[1:]] == [
        span.position + span.length for span in spans[:-1]
    ]
    assert {prompt[span.position] for span in spans} == {IDS[VIDEO]}


async def test_what_is_no_video_is_refused(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = video(40, Fraction(10), (32, 24))
    async with serving(tmp_path, tokenizer, "qwen3_vl", max_video_bytes=20_000_000) as mesh:
        for given, problem in (
            (random.randbytes(1000), "is no video"),
            (film[: len(film) // 2], "is damaged"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await chat(mesh, part(given))
            error = from_rpc_error(caught.value)
            assert error.param == "messages[0].content[0].video_url.url"
            assert problem in error.message
        assert mesh.app.images.held.num_bytes == 0
    monkeypatch.setattr(containers, "find_spec", lambda name: None)
    (tmp_path / "bare").mkdir()
    async with serving(tmp_path / "bare", tokenizer, "qwen3_vl") as mesh:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await chat(mesh, part(film))
        assert "extra `video`" in from_rpc_error(caught.value).message


async def test_all_ways_to_send_a_video_give_one_prompt(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Chats, Responses and what continues them, also in a tool's result, typed gRPC; what counts
    tokens counts the same.
    """
    film, words = video(30, Fraction(10), (32, 24)), {"type": "text", "text": "What is it?"}
    async with serving(tmp_path, tokenizer, "qwen3_vl") as mesh:
        worker = mesh.workers[0]
        answer = await chat(mesh, part(film), words)
        wanted = worker.prompts[-1]
        messages = [{"role": "user", "content": [part(film), words]}]
        assert (await mesh.json("TokenizeText", {"messages": messages}))["tokens"] == wanted
        assert answer["usage"]["prompt_tokens"] == len(wanted)

        seen = {"type": "input_video", "video_url": url(film)}
        item = {
            "role": "user",
            "content": [seen, {"type": "input_text", "text": words["text"]}],
        }
        first = await mesh.dialect(
            "Responses", "CreateResponse", {"input": [item], "max_output_tokens": 2}
        )
        assert worker.prompts[-1] == wanted
        assert first["usage"]["input_tokens"] == len(wanted)
        counted = await mesh.dialect("Responses", "CountInputTokens", {"input": [item]})
        assert counted["input_tokens"] == len(wanted)
        more = {"previous_response_id": first["id"], "input": "And?", "max_output_tokens": 2}
        await mesh.dialect("Responses", "CreateResponse", more)
        shared = len(wanted) - len(mesh.ids("<|im_start|>assistant\n"))
        assert worker.prompts[-1][:shared] == wanted[:shared]
        called = {"type": "function_call", "call_id": "a", "name": "film", "arguments": "{}"}
        result = {"type": "function_call_output", "call_id": "a", "output": [seen]}
        asked = {"role": "user", "content": "Film."}
        body = {"input": [asked, called, result], "max_output_tokens": 2}
        await mesh.dialect("Responses", "CreateResponse", body)
        assert worker.prompts[-1].count(IDS[VIDEO]) == wanted.count(IDS[VIDEO])

        for given in ({"data": film}, {"url": url(film)}):
            parts = [
                gateway_pb2.ContentPart(video=gateway_pb2.VideoFile(**given)),
                gateway_pb2.ContentPart(text=words["text"]),
            ]
            message = gateway_pb2.ChatMessage(role="user", parts=parts)
            typed = gateway_pb2.ChatRequest(messages=[message])
            typed.stop.max_tokens = 2
            last = [one async for one in mesh.typed.Chat(typed)][-1]
            assert worker.prompts[-1] == wanted
            assert last.usage.prompt_tokens == len(wanted)
            counted = await mesh.typed.Tokenize(gateway_pb2.TokenizeRequest(messages=[message]))
            assert list(counted.tokens.ids) == wanted
        assert len({one.digest for one in worker.media.values()}) == len(worker.submits[0].spans)
        await mesh.wait(lambda: not mesh.app.images.held.num_bytes)


async def test_dialects_without_videos_refuse_them_by_name(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Anthropic's and Ollama's APIs have no place for one; a tool's result goes on with a text."""
    film = base64.b64encode(video(8, Fraction(10), (32, 24))).decode()
    source = {"type": "base64", "media_type": "video/mp4", "data": film}
    block = {"type": "video", "source": source}
    used = {"type": "tool_use", "id": "a", "name": "film", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    refused = (
        ("Anthropic", "CreateMessage", [block], "messages[0].content[0].type"),
        (
            "Anthropic",
            "CreateMessage",
            [{"type": "image", "source": source}],
            "messages[0].content[0].source.data",
        ),
        ("Ollama", "Chat", {"videos": [film]}, "messages[0].videos"),
        ("Ollama", "Chat", {"audios": [film]}, "messages[0].audios"),
        ("Ollama", "Chat", {"images": [film]}, "messages[0].images[0]"),
        ("Ollama", "Generate", {"videos": [film]}, "videos"),
    )
    async with serving(tmp_path, tokenizer, "qwen3_vl") as mesh:
        for service, method, given, param in refused:
            if service == "Anthropic":
                body = {"messages": [{"role": "user", "content": given}], "max_tokens": 2}
            elif method == "Chat":
                body = {"messages": [{"role": "user", "content": "Look", **given}]}
            else:
                body = {"prompt": "Look", **given}
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await mesh.dialect(service, method, body)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequest)
            assert (error.param, error.http_status) == (param, 400), error.message
        messages = [
            {"role": "user", "content": "Look"},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]
        await mesh.dialect("Anthropic", "CreateMessage", {"messages": messages, "max_tokens": 2})
        prompt = tokenizer.decode(mesh.workers[0].prompts[-1], skip_special_tokens=False)
        assert "The tool returned content of type video." in prompt


def prompt_of(mesh: Harness) -> str:
    return str(mesh.tokenizer.decode(mesh.workers[0].prompts[-1], skip_special_tokens=False))


async def test_parts_keep_their_order_and_spelled_marks_are_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """A text between two videos stays there; one that spells the marks of frames makes none."""
    first, second = (video(count, Fraction(10), (32, 24)) for count in (20, 40))
    spelled = f"{START}{VIDEO}{VIDEO}{END}"
    words = {"type": "text", "text": f"{spelled} then"}
    async with serving(tmp_path, tokenizer, "qwen2_5_vl") as mesh:
        await chat(mesh, part(first), words, part(second), words)
        prompt, (submit,), text = (
            mesh.workers[0].prompts[0],
            mesh.workers[0].submits,
            prompt_of(mesh),
        )
        alone = await chat(mesh, words)
        spoken, told = mesh.workers[0].prompts[-1], prompt_of(mesh)
    frames = sum(span.length for span in submit.spans)
    assert prompt.count(IDS[VIDEO]) == frames
    places = [p for one in submit.spans for p in range(one.position, one.position + one.length)]
    assert [prompt[place] for place in places] == [IDS[VIDEO]] * frames
    film = re.compile(rf"{re.escape(START)}({re.escape(VIDEO)}){{3,}}{re.escape(END)}")
    before, _, between, _, after = film.split(text)
    assert before.endswith("user\n")
    assert between == words["text"]
    assert after.startswith(f"{words['text']}<|im_end|>")
    assert IDS[VIDEO] not in spoken
    assert words["text"] in told
    assert alone["usage"]["prompt_tokens"] == len(spoken)


async def test_a_video_is_known_by_its_frames(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Not by what a client or the file calls it: the same frames in another file are the same
    media, other frames under the same name are not.
    """
    film, other = (video(30, Fraction(10), (32, 24)) for _ in range(2))
    renamed = film + (16).to_bytes(4, "big") + b"free" + random.randbytes(8)
    async with serving(tmp_path, tokenizer, "qwen3_vl") as mesh:
        for data in (film, renamed, other):
            await chat(mesh, {**part(data), "uuid": "the same"})
        digests = [[span.digest for span in submit.spans] for submit in mesh.workers[0].submits]
    assert digests[0] == digests[1]
    assert not {*digests[0]} & {*digests[2]}


async def test_urls_of_videos_are_fetched_where_that_is_allowed(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    film = video(20, Fraction(10), (32, 24))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(film)}\r\n\r\n".encode() + film)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    seen = {"type": "video_url", "video_url": {"url": f"http://{host}/a.mp4"}}
    async with server:
        async with serving(tmp_path, tokenizer, "qwen3_vl", media_private_hosts=[host]) as mesh:
            await chat(mesh, part(film))
            await chat(mesh, seen)
            first, second = mesh.workers[0].prompts
            assert first == second
        (tmp_path / "closed").mkdir()
        async with serving(tmp_path / "closed", tokenizer, "qwen3_vl") as mesh:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await chat(mesh, seen)
            error = from_rpc_error(caught.value)
            assert "fetches none" in error.message
            assert isinstance(error, InvalidRequest)
            assert error.param == "messages[0].content[0].video_url.url"


async def test_what_tools_return_never_ends_a_session(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A damaged video, and tensors, which are taken from no client."""
    film = video(20, Fraction(10), (32, 24))
    tensors = [
        {"type": f"{kind}_embeds", f"{kind}_embeds": base64.b64encode(bytes(64)).decode()}
        for kind in ("image", "audio", "video")
    ]
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    asked = {"role": "user", "content": "x"}
    async with serving(tmp_path, tokenizer, "qwen3_vl") as mesh:
        for bad, text in (
            (part(random.randbytes(500)), "[The tool returned a video. It is no video"),
            (part(film[:-200]), "[The tool returned a video. It is damaged"),
            *((one, f"content of type {one['type']}") for one in tensors),
        ):
            result = {"role": "tool", "tool_call_id": "a", "content": [bad, part(film)]}
            body = {"messages": [asked, said, result], "max_tokens": 2}
            await mesh.json("ChatCompletions", body)
            assert text in prompt_of(mesh)
            assert mesh.workers[0].prompts[-1].count(IDS[VIDEO]) > 0
        for one in tensors:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await chat(mesh, one)
            error = from_rpc_error(caught.value)
            assert isinstance(error, InvalidRequest)
            assert error.param == "messages[0].content[0].type"
