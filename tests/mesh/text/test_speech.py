"""Speech through a whole mesh by OpenAI's client: a prefill worker computes the clips; all forms,
events, and a decode worker that is killed in the middle.
"""

from __future__ import annotations

import io
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.models.tiny_speech import make_talker

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400), pytest.mark.full]

RATE = 16_000


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    folder = make_talker(tmp_path_factory.mktemp("speech") / "hearing", random.randrange(1 << 30))
    flags = ("--model", str(folder), "--dtype", "float32", "--decode", "2")
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags, "--local-prefill-max-tokens", "0")
    with mesh.serving():
        yield mesh


@pytest.fixture
def client(mesh: LocalMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mesh.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def file_of(seconds: float) -> tuple[str, bytes]:
    samples = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.1, int(seconds * RATE))
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV")
    return "speech.wav", out.getvalue()


def ask(client: openai.OpenAI, file: tuple[str, bytes], **fields: Any) -> Any:
    return client.audio.transcriptions.create(model="hearing", file=file, language="en", **fields)


def test_all_forms_and_events_have_one_text(client: openai.OpenAI, mesh: LocalMesh) -> None:
    file = file_of(3.0)
    text = ask(client, file).text
    verbose = ask(client, file, response_format="verbose_json")
    assert verbose.text == text
    assert verbose.duration == pytest.approx(3.0)
    assert "".join(one.text for one in verbose.segments).strip() == text
    assert ask(client, file, response_format="text").strip() == text
    assert ask(client, file, response_format="vtt").startswith("WEBVTT")
    assert ask(client, file, response_format="srt").count("-->") == len(verbose.segments)
    events = list(ask(client, file, stream=True))
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == text
    assert "".join(one.delta for one in events[:-1]).strip() == text
    made = client.audio.translations.create(model="hearing", file=file)
    assert isinstance(made.text, str)
    timed = ask(
        client,
        file,
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert [one.text for one in timed.segments] == [one.text for one in verbose.segments]
    said = "".join("".join(one.text for one in timed.segments).split())
    assert "".join("".join(one.word.split()) for one in timed.words) == said
    assert all(0 <= one.start <= one.end <= 3.1 for one in timed.words)
    fills = [mesh.counters(f"decode-{number}")["fills_done"] for number in range(2)]
    assert sum(fills) > 0, "the prefill worker computes the clips"


def test_what_is_no_speech_is_refused_by_name(client: openai.OpenAI) -> None:
    for file in (("a.wav", b"RIFF but no sound"), ("a.mp4", random.randbytes(2000))):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, file)
        assert caught.value.param == "file"
    with pytest.raises(openai.BadRequestError) as caught:
        client.audio.transcriptions.create(model="hearing", file=file_of(1.0), language="xx")
    assert caught.value.param == "language"


def test_a_killed_worker_changes_no_text(client: openai.OpenAI, mesh: LocalMesh) -> None:
    file, ended = file_of(12.0), threading.Event()
    wanted = ask(client, file, response_format="verbose_json")

    def kill() -> None:
        for number in range(2):
            time.sleep(random.uniform(0.05, 0.4))
            if not ended.is_set():
                os.kill(mesh.service(f"decode-{number}")["engine_pid"], signal.SIGKILL)
                mesh.wait_healthy()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = ask(client, file, response_format="verbose_json")
    finally:
        ended.set()
        killer.join()
    assert found.text == wanted.text
    assert [one.start for one in found.segments] == [one.start for one in wanted.segments]
    mesh.wait_healthy()
