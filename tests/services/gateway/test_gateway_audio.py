"""Files of speech, from a form to what a worker gets and the transcript that comes back."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import soundfile
from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from transformers import WhisperFeatureExtractor
from weft.common.rpc.errors import from_rpc_error
from weft.contract.errors import InvalidRequest, WeftError
from weft.testing.models.tiny_speech import (
    CONTEXT_TOKENS,
    NUM_ROWS,
    NUM_SAMPLES,
    add_speech,
    speech_tokenizer,
)
from weft.testing.models.tiny_whisper import in_float64
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import Harness, gateway
from weft.v1 import common_pb2, decode_pb2, dialects_pb2_grpc

RATE = 16_000
IDS = speech_tokenizer().get_vocab()
END, START, NO_SPEECH = IDS["<|endoftext|>"], IDS["<|startoftranscript|>"], IDS["<|nospeech|>"]
FIRST = IDS["<|notimestamps|>"] + 1
SAMPLES = np.random.default_rng(5).normal(0, 0.1, 3 * RATE).astype(np.float32)
"""3 s: two clips."""


def words(text: str) -> list[int]:
    return list(speech_tokenizer().encode(text, add_special_tokens=False).ids)


def at(seconds: float) -> int:
    return FIRST + round(seconds * 50)


class Speech:
    """Answers prompts clip by clip, and those that ask for the first token."""

    def __init__(self, *clips: list[int], logprob: float = -0.25) -> None:
        self.clips, self.logprob = list(clips), logprob
        self.submits: list[tuple[decode_pb2.Submit, list[int]]] = []

    def __call__(self, submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if not submit.sampling.HasField("time_tokens"):
            return Script(tokens=[[NO_SPEECH]])
        self.submits.append((submit, prompt))
        return Script(tokens=[[*self.clips.pop(0), END]], logprob=self.logprob)


TWO = (
    [at(0), *words(" Hello"), at(1), at(1), *words(" wor")],
    [at(0), *words(" world."), at(2)],
)


def serving(folder: Path, speech: Speech, **options: Any) -> Any:
    return gateway(
        folder,
        speech,
        tokenizer=speech_tokenizer(),
        max_context_tokens=CONTEXT_TOKENS,
        change_model=partial(add_speech, **options),
    )


def wav(samples: np.ndarray = SAMPLES) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV", subtype="FLOAT")
    return out.getvalue()


async def ask(mesh: Harness, method: str = "Transcriptions", **fields: Any) -> list[HttpBody]:
    file = fields.pop("file", wav())
    form = httpx.Request("POST", "http://x/", data=fields, files={"file": ("a.wav", file)})
    request = HttpBody(content_type="application/json", data=form.read())
    return [message async for message in getattr(mesh.openai, method)(request)]


async def refusal(mesh: Harness, method: str = "Transcriptions", **fields: Any) -> WeftError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(mesh, method, **fields)
    return from_rpc_error(caught.value)


def clips_of(samples: np.ndarray, *starts: int) -> list[np.ndarray]:
    """The clips of transformers' spectrogram of the whole file that begin at some samples."""
    extract = in_float64(WhisperFeatureExtractor(feature_size=80, chunk_length=2))
    options: dict[str, Any] = {"truncation": False, "padding": "longest"}
    mel = extract(samples, sampling_rate=RATE, return_tensors="np", **options).input_features[0]
    found = []
    for start in starts:
        part = mel[:, start // 160 :][:, : NUM_SAMPLES // 160]
        found.append(np.pad(part, ((0, 0), (0, NUM_SAMPLES // 160 - part.shape[1]))))
    return found


async def test_a_clip_begins_where_the_last_whole_segment_has_ended(tmp_path: Path) -> None:
    speech = Speech(*TWO)
    async with serving(tmp_path, speech) as mesh:
        (answer,) = await ask(
            mesh, response_format="verbose_json", language="en", prompt="Names: Weft"
        )
        found = json.loads(answer.data)
        media = list(mesh.workers[0].media.values())
    assert found["text"] == "Hello world."
    assert found["duration"] == pytest.approx(3.0)
    assert [(one["start"], one["end"]) for one in found["segments"]] == [(0.0, 1.0), (1.0, 3.0)]
    assert found["segments"][0]["avg_logprob"] == pytest.approx(-0.25, abs=0.01)
    for one, wanted in zip(media, clips_of(SAMPLES, 0, RATE), strict=True):
        found = np.frombuffer(one.data, "<f4").reshape(wanted.shape)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    (first, begin), (_, after) = speech.submits
    task = [START, IDS["<|en|>"], IDS["<|transcribe|>"]]
    before = [IDS["<|startofprev|>"], *words(" Names: Weft")]
    assert begin == [END] * NUM_ROWS + before + task
    said = [*words(" Names: Weft"), at(0), *words(" Hello"), at(1)][-19:]
    assert after[NUM_ROWS:] == [IDS["<|startofprev|>"], *said, *task]
    (span,) = first.spans
    assert (span.position, span.length, span.offset) == (0, NUM_ROWS, 0)
    times = first.sampling.time_tokens
    assert (times.first, times.end, times.max_initial) == (FIRST, END, 50)
    assert first.sampling.temperature == 0
    assert 7 in first.sampling.logit_bias
    assert END not in first.sampling.logit_bias


async def test_answers_come_in_all_forms(tmp_path: Path) -> None:
    speech = Speech(*TWO * 4)
    async with serving(tmp_path, speech) as mesh:
        kinds = {}
        for form in ("json", "text", "srt", "vtt"):
            (answer,) = await ask(mesh, response_format=form, language="en")
            kinds[form] = answer.content_type, answer.data.decode()
    assert json.loads(kinds["json"][1])["text"] == "Hello world."
    assert kinds["text"] == ("text/plain; charset=utf-8", "Hello world.\n")
    assert "00:00:01,000 --> 00:00:03,000\nworld." in kinds["srt"][1]
    assert kinds["vtt"][1].startswith("WEBVTT\n\n00:00:00.000 --> 00:00:01.000\nHello\n")


@pytest.mark.parametrize(("name", "codec"), [("a.m4a", "aac"), ("a.webm", "libopus")])
async def test_files_of_phones_and_browsers(tmp_path: Path, name: str, codec: str) -> None:
    av = pytest.importorskip("av")
    out = io.BytesIO()
    out.name = name
    with av.open(out, "w") as container:
        stream = container.add_stream(codec, rate=48_000, layout="mono")
        for part in np.resize(SAMPLES, (140, 960)):
            frame = av.AudioFrame.from_ndarray(part[None], format="fltp", layout="mono")
            frame.sample_rate = 48_000
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    async with serving(tmp_path, Speech(*TWO)) as mesh:
        (answer,) = await ask(mesh, language="en", file=out.getvalue())
    assert json.loads(answer.data)["text"] == "Hello world."


async def test_events_come_clip_by_clip(tmp_path: Path) -> None:
    async with serving(tmp_path, Speech(*TWO)) as mesh:
        messages = await ask(mesh, stream="true", language="en")
    assert {one.content_type for one in messages} == {"text/event-stream; charset=utf-8"}
    texts = b"".join(one.data for one in messages).decode().split("\n\n")[:-1]
    events = [json.loads(text.removeprefix("data: ")) for text in texts]
    assert [one["type"] for one in events[:-1]] == ["transcript.text.delta"] * 2
    assert "".join(one["delta"] for one in events[:-1]) == events[-1]["text"] == "Hello world."
    assert events[-1]["type"] == "transcript.text.done"


async def test_improbable_texts_are_drawn_again_and_silence_is_left_out(tmp_path: Path) -> None:
    def at_temperature(speech: Speech) -> Callable[[decode_pb2.Submit, list[int]], Script]:
        def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
            if prompt[NUM_ROWS:] == [START]:
                return Script(tokens=[[NO_SPEECH]], logprob=-0.1)
            speech.submits.append((submit, prompt))
            is_warm = submit.sampling.temperature > 0.3
            text = words(" good") if is_warm else words(" bad")
            return Script(tokens=[[at(0), *text, at(2), END]], logprob=-0.3 if is_warm else -1.5)

        return script

    speech = Speech()
    async with serving(tmp_path, at_temperature(speech)) as mesh:  # type: ignore[arg-type]
        (answer,) = await ask(mesh, language="en", file=wav(SAMPLES[:RATE]))
    assert json.loads(answer.data)["text"] == "good"
    temperatures = [submit.sampling.temperature for submit, _ in speech.submits]
    assert temperatures == pytest.approx([0.0, 0.2, 0.4])
    assert [submit.sampling.n for submit, _ in speech.submits] == [1, 5, 5]


async def test_samples_that_go_round_in_circles_do_not_count(tmp_path: Path) -> None:
    """All tokens are as probable, and so the mean is the same for all samples."""
    circle = words(" well" * 4)

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if prompt[NUM_ROWS:] == [START]:
            return Script(tokens=[[NO_SPEECH]], logprob=-0.1)
        if submit.sampling.temperature == 0:
            return Script(tokens=[[at(0), *circle, at(2), END]], logprob=-1.5)
        samples = [circle, words(" well said"), words(" so long a text")]
        return Script(tokens=[[at(0), *one, at(2), END] for one in samples], logprob=-0.5)

    async with serving(tmp_path, script) as mesh:  # type: ignore[arg-type]
        (answer,) = await ask(mesh, language="en", file=wav(SAMPLES[:RATE]))
    assert json.loads(answer.data)["text"] == "well said"


@pytest.mark.parametrize("beam_size", [None, 1, 3])
async def test_a_clip_is_searched_by_beams_and_samples_are_drawn(
    tmp_path: Path, beam_size: int | None
) -> None:
    widths = []

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if prompt[NUM_ROWS:] == [START]:
            return Script(tokens=[[NO_SPEECH]], logprob=-9.0)
        widths.append(submit.sampling.beams.width)
        is_warm = submit.sampling.temperature > 0
        text = words(" good") if is_warm else words(" bad")
        return Script(tokens=[[at(0), *text, at(2), END]], logprob=-0.3 if is_warm else -1.5)

    fields = {} if beam_size is None else {"beam_size": str(beam_size)}
    async with serving(tmp_path, script) as mesh:  # type: ignore[arg-type]
        (answer,) = await ask(mesh, language="en", file=wav(SAMPLES[:RATE]), **fields)
    assert json.loads(answer.data)["text"] == "good"
    assert widths == [{None: 5, 1: 0, 3: 3}[beam_size], 0]


@pytest.mark.parametrize("beam_size", [None, 4])
async def test_a_worker_without_room_for_beams_is_asked_for_one_text(
    tmp_path: Path, beam_size: int | None
) -> None:
    """Unless the client has asked for them."""
    widths = []

    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        widths.append(submit.sampling.beams.width)
        if widths[-1]:
            error = common_pb2.ErrorDetail(
                code="INVALID_REQUEST", stage="validate", message="no room", param="beams"
            )
            code = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            failed = decode_pb2.SessionEvent.Failed(error=error, grpc_code=code)
            return Script(tokens=[[END]], fail=failed, fail_after=0)
        return Script(tokens=[[at(0), *words(" Hello"), at(2), END]], logprob=-0.3)

    fields = {} if beam_size is None else {"beam_size": str(beam_size)}
    async with serving(tmp_path, script) as mesh:  # type: ignore[arg-type]
        call = ask(mesh, language="en", file=wav(SAMPLES), **fields)
        if beam_size is None:
            await call
            assert widths == [5, 0, 0]
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="no room"):
                await call


async def test_of_doubtful_texts_the_most_probable_one_is_told(tmp_path: Path) -> None:
    def script(submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        if prompt[NUM_ROWS:] == [START]:
            return Script(tokens=[[NO_SPEECH]], logprob=-9.0)
        tenths = round(10 * submit.sampling.temperature)
        text = words(f" {tenths}")
        return Script(tokens=[[at(0), *text, at(2), END]], logprob=-1.2 if tenths == 4 else -2.0)

    async with serving(tmp_path, script) as mesh:  # type: ignore[arg-type]
        (answer,) = await ask(
            mesh, language="en", file=wav(SAMPLES[:RATE]), response_format="verbose_json"
        )
    (segment,) = json.loads(answer.data)["segments"]
    assert (segment["text"], segment["temperature"]) == (" 4", 1.0)


async def test_what_a_model_or_a_file_cannot_do_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, Speech(), is_multilingual=False) as mesh:
        cases = [
            await refusal(mesh, file=b"RIFF no audio"),
            await refusal(mesh, language="de"),
            await refusal(mesh, "Translations"),
            await refusal(mesh, model="other"),
        ]
        for method, body in {
            "ChatCompletions": {"messages": [{"role": "user", "content": "a"}]},
            "Completions": {"prompt": "a"},
        }.items():
            with pytest.raises(grpc.aio.AioRpcError, match="/v1/audio/transcriptions"):
                await mesh.json(method, body)
        held = mesh.app.images.held.num_bytes
    assert [one.param for one in cases] == ["file", "language", "model", "model"]
    assert isinstance(cases[0], InvalidRequest)
    assert held == 0


async def test_probes_of_generation_are_clips_of_silence(tmp_path: Path) -> None:
    async with serving(tmp_path, Speech()) as mesh:
        await dialects_pb2_grpc.ServerServiceStub(mesh.channel).HealthGenerate(Empty())
        (submit,) = mesh.workers[0].submits
    assert submit.prompt_length == NUM_ROWS + 1
    (span,) = submit.spans
    assert span.length == NUM_ROWS


async def test_a_file_that_unpacks_to_much_is_refused_as_in_chats(tmp_path: Path) -> None:
    """Minutes of silence are a few bytes, and a header may say that they are seconds. So is a file
    of too many bytes.
    """
    out = io.BytesIO()
    soundfile.write(out, np.zeros(60 * RATE, np.float32), RATE, format="FLAC")
    forged = bytearray(wav(np.zeros(RATE, np.float32)))
    forged[24:28] = (100).to_bytes(4, "little")
    async with gateway(
        tmp_path,
        Speech(),
        tokenizer=speech_tokenizer(),
        max_context_tokens=CONTEXT_TOKENS,
        change_model=add_speech,
        max_audio_seconds=20.0,
        max_audio_bytes=150_000,
    ) as mesh:
        for file in (out.getvalue(), bytes(forged), wav(SAMPLES)):
            error = await refusal(mesh, file=file, language="en")
            assert isinstance(error, InvalidRequest)
            assert error.param == "file"
        await mesh.wait(lambda: not mesh.app.images.held.num_bytes)
