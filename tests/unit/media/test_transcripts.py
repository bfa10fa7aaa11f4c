"""How times divide a clip's tokens, against transformers, and the forms of transcripts."""

from __future__ import annotations

import json
import random
import re
from contextlib import suppress
from dataclasses import replace

import httpx
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from weft.contract.errors import InvalidRequest
from weft.gateway.api.audio.answers import render
from weft.gateway.api.audio.bodies import SpeechBody, read_form
from weft.gateway.api.audio.form import parse_form
from weft.gateway.api.audio.segments import Decoded, Segment, divide
from weft.gateway.api.audio.words import Word

FIRST = 100


def tokens(rng: random.Random) -> list[int]:
    """Tokens as the rules of times allow them."""
    ids, time = [FIRST + rng.randrange(10)], 10
    for _ in range(rng.randint(0, 3)):
        ids += [rng.randrange(FIRST) for _ in range(rng.randint(1, 4))]
        time += rng.randint(1, 20)
        ids += [FIRST + time] * 2
    end = rng.random()
    if end < 0.4 and len(ids) > 1:
        return ids[:-1]
    return [*ids, rng.randrange(FIRST)] if end < 0.8 else ids


def test_clips_are_divided_as_transformers_divides_them() -> None:
    rng = random.Random()
    for _ in range(500):
        ids = tokens(rng)
        if len(ids) < 2 or not any(one < FIRST for one in ids):
            continue
        found, done = divide(ids, FIRST, 3000)
        wanted, offset = WhisperForConditionalGeneration._retrieve_segment(
            seek_sequence=torch.tensor(ids),
            seek_outputs=[torch.tensor(ids)],
            time_offset=torch.zeros(1, dtype=torch.float64),
            timestamp_begin=FIRST,
            seek_num_frames=torch.tensor([3000]),
            time_precision=0.02,
            time_precision_features=0.01,
            input_stride=2,
            prev_idx=0,
            idx=0,
            return_token_timestamps=False,
            decoder_input_ids=torch.zeros((1, 0), dtype=torch.int64),
        )
        # Weft leaves pieces without a text out later.
        pairs = zip(found, wanted, strict=True)
        assert done == int(offset), ids
        for piece, segment in pairs:
            words = [one for one in segment["tokens"].tolist() if one < FIRST]
            assert [one for one in piece.ids if one < FIRST] == words
            assert piece.start * 0.01 == pytest.approx(float(segment["start"]))
            assert piece.end * 0.01 == pytest.approx(float(segment["end"]))


def segment(start_s: float, end_s: float, text: str) -> Segment:
    clip = Decoded(ids=(1, 2), text=text, temperature=0.2, avg_logprob=-0.25, no_speech=0.1)
    return Segment(start_s=start_s, end_s=end_s, text=text, ids=(1, 2), seek=0, clip=clip)


WORDS = (Word(61.5, 62.25, " Three."),)
SEGMENTS = [
    segment(0, 61.5, " One --> two."),
    replace(segment(61.5, 3723.04, " Three."), words=WORDS),
]


def test_transcripts_have_the_forms_that_clients_ask_for() -> None:
    def made(form: str, *times: str) -> str:
        fields = {"response_format": form, "timestamp_granularities": times}
        body = SpeechBody.model_validate(fields)
        return render(body, SEGMENTS, 4000.0, "en", "transcribe").decode()

    assert made("text") == "One --> two. Three.\n"
    assert made("srt") == (
        "1\n00:00:00,000 --> 00:01:01,500\nOne -> two.\n\n"
        "2\n00:01:01,500 --> 01:02:03,040\nThree.\n"
    )
    assert made("vtt") == (
        "WEBVTT\n\n00:00:00.000 --> 00:01:01.500\nOne -> two.\n\n"
        "00:01:01.500 --> 01:02:03.040\nThree.\n"
    )
    usage = {"type": "duration", "seconds": 4000.0}
    assert json.loads(made("json")) == {"text": "One --> two. Three.", "usage": usage}
    verbose = json.loads(made("verbose_json"))
    assert verbose["duration"] == 4000.0
    assert [one["id"] for one in verbose["segments"]] == [0, 1]
    assert verbose["segments"][1]["start"] == 61.5
    words = json.loads(made("verbose_json", "word"))
    assert words["words"] == [{"word": "Three.", "start": 61.5, "end": 62.25}]
    assert "segments" not in words
    assert {"segments", "words"} < json.loads(made("verbose_json", "word", "segment")).keys()


def form_of(file: bytes = b"RIFF", **fields: object) -> bytes:
    """As httpx, and so OpenAI's client, writes it."""
    request = httpx.Request("POST", "http://x/", data=fields, files={"file": ("a.wav", file)})
    return request.read()


def test_fields_and_files_come_out_of_a_form_as_they_went_in() -> None:
    for _ in range(100):
        file = random.randbytes(random.randint(1, 3000))
        name = "".join(random.choice('aé-\n" =;') for _ in range(20))
        form = parse_form(form_of(file, prompt=name, language="de"))
        assert form.files == {"file": file}
        assert form.texts == {"prompt": [name], "language": ["de"]}


def test_damaged_forms_are_refused() -> None:
    whole = form_of(random.randbytes(300), prompt="p")
    for _ in range(300):
        at = random.randrange(len(whole))
        changed = whole[:at] + random.randbytes(random.randint(0, 3)) + whole[at + 1 :]
        with suppress(InvalidRequest):
            parse_form(changed if random.random() < 0.5 else whole[:at])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "2"}, "temperature"),
        ({"temperature": "warm"}, "temperature"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"chunking_strategy": '{"type": "server_vad"}'}, "chunking_strategy"),
        ({"beams": "5"}, "beams"),
    ],
)
def test_fields_that_are_not_served_are_refused_by_name(fields: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(param)) as caught:
        read_form(parse_form(form_of(**fields)), translates=False)
    assert caught.value.param == param


def test_translations_lack_some_fields_and_forms_need_a_file() -> None:
    with pytest.raises(InvalidRequest, match="language"):
        read_form(parse_form(form_of(language="de")), translates=True)
    with pytest.raises(InvalidRequest, match="file"):
        read_form(parse_form(form_of(b"")), translates=False)
