"""Chats with videos, from the body to the tokens and media that a worker gets."""

from __future__ import annotations

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
from weft.testing.models.tiny_qwen_vl import IDS, MARKS, SQUARE, START, VIDEO
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
