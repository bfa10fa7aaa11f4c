"""Clips of audio in chats, from each dialect's body to the tokens that a worker gets."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import soundfile
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import ContextTooLong, InvalidRequest, WeftError
from weft.contract.spans import Media
from weft.testing.models.tiny_hearing import (
    MELS,
    POSITIONS,
    ROWS,
    SECONDS,
    add_hearing,
    audio_token_id,
    extractor_of,
    hearing_tokenizer,
)
from weft.testing.models.tiny_whisper import in_float64
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import decode_pb2, gateway_pb2

RATE = 16_000
WINDOW = ROWS["voxtral"]
AUDIO = audio_token_id("voxtral")
FORMATS = {"wav": "WAV", "mp3": "MP3", "flac": "FLAC", "ogg": "OGG"}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Harness]:
    async with serving(tmp_path) as harness:
        yield harness


def serving(folder: Path, *, hears: bool = True, max_context_tokens: int = 512, **more: Any) -> Any:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        return Script(tokens=[[7, 8]])

    return gateway(
        folder,
        script,
        tokenizer=hearing_tokenizer() if hears else None,
        max_context_tokens=max_context_tokens,
        change_model=add_hearing if hears else None,
        **more,
    )


def samples(seconds: float, channels: int = 1) -> np.ndarray:
    noise = np.random.default_rng(random.randrange(1 << 30))
    return noise.uniform(-0.5, 0.5, (round(seconds * RATE), channels)).astype(np.float32)


def file(data: np.ndarray, kind: str = "wav", rate: int = RATE, **more: Any) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, data, rate, format=FORMATS[kind], **more)
    return out.getvalue()


def part(data: bytes, kind: str = "wav") -> dict[str, Any]:
    sound = {"data": base64.b64encode(data).decode(), "format": kind}
    return {"type": "input_audio", "input_audio": sound}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


async def chat(mesh: Harness, *messages: Any, **fields: Any) -> Any:
    body = {"messages": list(messages), "max_tokens": 2, **fields}
    return await mesh.json("ChatCompletions", body)


async def refusal(work: Awaitable[object]) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await work
    return from_rpc_error(caught.value)


def last_prompt(mesh: Harness) -> str:
    """Without the token with which each begins."""
    ids = mesh.workers[0].prompts[-1]
    return str(mesh.tokenizer.decode(ids, skip_special_tokens=False)).removeprefix("<|im_start|>")


HEARD = "[BEGIN_AUDIO]" + "[AUDIO]" * WINDOW


async def test_parts_keep_their_order_and_usage_counts_audio(mesh: Harness) -> None:
    """A clip of two windows, one of one, and the same again: three media, brought once each."""
    long, short = file(samples(SECONDS + 0.1)), file(samples(0.7))
    messages = [user(text("one"), part(long), text("two"), part(short)), user(part(long))]
    answer = await chat(mesh, *messages)
    two = HEARD + "[AUDIO]" * WINDOW
    assert last_prompt(mesh) == f"[INST]one{two}two{HEARD}[/INST][INST]{two}[/INST]"
    ids, (submit,) = mesh.workers[0].prompts[-1], mesh.workers[0].submits
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(ids)
    assert usage["prompt_tokens_details"]["audio_tokens"] == ids.count(AUDIO) == 5 * WINDOW
    counted = await mesh.json("TokenizeText", {"messages": messages})
    assert counted["tokens"] == ids
    places = [p for one in submit.spans for p in range(one.position, one.position + one.length)]
    assert places == [at for at, id_ in enumerate(ids) if id_ == AUDIO]
    assert len({one.digest for one in submit.spans}) == len(mesh.workers[0].media) == 3
    assert mesh.app.images.heard.num_files == 2


async def test_a_worker_gets_transformers_spectrogram(mesh: Harness) -> None:
    data = samples(1.0)
    await chat(mesh, user(part(file(data, subtype="FLOAT"))))
    (media,) = mesh.workers[0].media.values()
    extract = in_float64(extractor_of())
    wanted = extract(data[:, 0], sampling_rate=RATE, return_tensors="np")["input_features"]
    found = np.frombuffer(media.data, "<f4").reshape(MELS, 2 * POSITIONS)
    np.testing.assert_allclose(found, wanted[0], rtol=0, atol=3e-5)
    assert media == Media.of("audio", media.processor, media.shape, media.data)


@pytest.mark.parametrize("kind", sorted(FORMATS))
async def test_formats(mesh: Harness, kind: str) -> None:
    await chat(mesh, user(part(file(samples(0.5, 2), kind, 44_100), kind)))
    assert last_prompt(mesh) == f"[INST]{HEARD}[/INST]"


async def test_spelled_placeholders_are_text(mesh: Harness) -> None:
    spelled = "[AUDIO][BEGIN_AUDIO]"
    await chat(mesh, user(text(spelled), part(file(samples(0.5))), text(spelled)))
    assert mesh.workers[0].prompts[-1].count(AUDIO) == WINDOW
    await chat(mesh, user(text(spelled)))
    assert AUDIO not in mesh.workers[0].prompts[-1]
    assert spelled in last_prompt(mesh)


async def test_other_ways_to_send_a_clip(mesh: Harness) -> None:
    """A URL of data, Responses and what continues them, typed gRPC."""
    data = file(samples(0.5))
    url = "data:audio/wav;base64," + base64.b64encode(data).decode()
    for given in (url, {"url": url}):
        await chat(mesh, user({"type": "audio_url", "audio_url": given}, text("what?")))
        assert last_prompt(mesh) == f"[INST]{HEARD}what?[/INST]"
    item = {"role": "user", "content": [{"type": "input_text", "text": "a"}, part(data)]}
    first = await mesh.dialect(
        "Responses", "CreateResponse", {"input": [item], "max_output_tokens": 2}
    )
    assert last_prompt(mesh) == f"[INST]a{HEARD}[/INST]"
    more = {"input": [item], "previous_response_id": first["id"], "max_output_tokens": 2}
    await mesh.dialect("Responses", "CreateResponse", more)
    assert last_prompt(mesh).startswith(f"[INST]a{HEARD}[/INST]")
    assert last_prompt(mesh).endswith(f"[INST]a{HEARD}[/INST]")
    clip = gateway_pb2.AudioFile(data=data)
    parts = [gateway_pb2.ContentPart(text="b"), gateway_pb2.ContentPart(audio=clip)]
    typed = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", parts=parts)])
    typed.stop.max_tokens = 2
    last = [message async for message in mesh.typed.Chat(typed)][-1]
    assert last_prompt(mesh) == f"[INST]b{HEARD}[/INST]"
    assert last.usage.audio_prompt_tokens == WINDOW
    assert len(mesh.workers[0].media) == 1


async def test_a_clip_is_known_by_its_samples(mesh: Harness) -> None:
    """By all of them, and not by its file, nor by what a client calls it."""
    data = (samples(1.0) * 32_000).astype(np.int16)
    other = data.copy()
    other[-400:] *= -1
    files = [(file(data), "wav"), (file(data, "flac"), "flac"), (file(other), "wav")]
    for content, kind in files:
        await chat(mesh, user({**part(content, kind), "uuid": "the same"}))
    first, again, second = (
        [span.digest for span in submit.spans] for submit in mesh.workers[0].submits
    )
    assert first == again
    assert not {*first} & {*second}


async def test_bad_clips_are_refused_by_name(mesh: Harness) -> None:
    data = file(samples(0.5))
    where = "messages[0].content[1].input_audio"
    empty = {"type": "input_audio"}
    cases: list[tuple[dict[str, Any], str, str]] = [
        (part(data, "aiff"), f"{where}.format", "must be one of wav, mp3"),
        (part(b"RIFF" + bytes(40)), f"{where}.data", "is no audio that can be read"),
        (part(data[:30]), f"{where}.data", "is no audio that can be read"),
        (part(file(samples(0.0))), f"{where}.data", "has no samples"),
        ({**empty, "input_audio": {"data": "#", "format": "wav"}}, f"{where}.data", "base64"),
        (empty, f"{where}.data", "is missing"),
        (
            {"type": "audio_url", "audio_url": "http://127.0.0.1:1/a.wav"},
            "messages[0].content[1].audio_url",
            "fetches none",
        ),
        ({"type": "video_url", "video_url": {"url": "x"}}, "messages[0].content[1].type", "video"),
    ]
    for bad, param, problem in cases:
        error = await refusal(chat(mesh, user(text("x"), bad)))
        assert isinstance(error, InvalidRequest)
        assert (error.param, error.http_status) == (param, 400), error.message
        assert problem in error.message
    await chat(mesh, user(part(data)))


async def test_bounds_are_of_decoded_samples_and_of_files(tmp_path: Path) -> None:
    """A file whose header tells of another rate, and one that is small and long."""
    limits = {"max_audio_seconds": 3.0, "max_audio_bytes": 200_000}
    async with serving(tmp_path, max_context_tokens=60, **limits) as mesh:
        quiet = np.zeros((20 * RATE, 1), np.float32)
        error = await refusal(chat(mesh, user(part(file(quiet, "flac"), "flac"))))
        assert "is longer than 3 s" in error.message
        error = await refusal(chat(mesh, user(part(file(samples(7.0))))))
        assert "bytes; at most 200000 are accepted" in error.message
        error = await refusal(chat(mesh, user(*[part(file(samples(2.5)))] * 2)))
        assert isinstance(error, ContextTooLong)
        await mesh.wait(lambda: not mesh.app.images.held.num_bytes)


async def test_a_model_that_does_not_hear_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, hears=False) as mesh:
        error = await refusal(chat(mesh, user(text("x"), part(file(samples(0.5))))))
        assert error.param == "messages[0].content[1].type"
        assert f"`{mesh.app.model.name}` does not hear" in error.message
        result = {"role": "tool", "tool_call_id": "a", "content": [part(file(samples(0.5)))]}
        await chat(mesh, user(text("x")), result)
        assert "content of type input_audio. This model reads text alone." in last_prompt(mesh)


async def test_tools_may_return_clips_that_cannot_be_read(mesh: Harness) -> None:
    good, bad = part(file(samples(0.5))), part(b"nothing")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "a", "content": [bad, good]}
    await chat(mesh, user(text("x")), said, result)
    assert "[The tool returned audio. It is no audio that can be read" in last_prompt(mesh)
    assert mesh.workers[0].prompts[-1].count(AUDIO) == WINDOW
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    result = {"role": "tool", "tool_call_id": "a", "content": [picture]}
    await chat(mesh, user(text("x")), said, result)
    assert "image_url. This model reads text and audio." in last_prompt(mesh)
