"""Clips of audio in chats through a whole mesh: from a client's bytes over the media processes, a
prefill worker and the KV store to an answer, which is transformers'.
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import soundfile
import torch
import transformers
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_hearing import (
    POSITIONS,
    SECONDS,
    extractor_of,
    hearing_logits,
    hearing_tokenizer,
    make_hearing,
    rows_of,
)

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400), pytest.mark.full]

RATE = 16_000
NUM_NEW = 12
NEAR_TIE = 1e-4
"""Spectrograms are of double precision here, and of single precision there."""


@pytest.fixture(scope="module", params=["voxtral", "qwen2_audio"])
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def model_dir(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hearing(kind, tmp_path_factory.mktemp("hears") / "hearing", random.randrange(2**31))


@pytest.fixture(
    scope="module",
    params=[" --language-model-only", ""],
    ids=["without its tower", "with its tower"],
)
def mesh(
    request: pytest.FixtureRequest,
    model_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
    rest_binary: Path,
) -> Iterator[LocalMesh]:
    """Prompts are computed by the prefill worker. The decode worker has no tower, or one that it
    does not need.
    """
    flags = ("--model", str(model_dir), "--dtype", "float32", "--kvstore", "1")
    flags += ("--local-prefill-max-tokens", "0", "--decode-args", PATIENT + request.param)
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags)
    with mesh.serving():
        yield mesh


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    found = transformers.AutoModelForMultimodalLM.from_pretrained(model_dir, dtype=torch.float32)
    return found.eval()


def sound(seconds: float) -> np.ndarray:
    source = np.random.default_rng(random.randrange(1 << 30))
    return source.uniform(-0.5, 0.5, round(seconds * RATE)).astype(np.float32)


def part(samples: np.ndarray) -> dict[str, Any]:
    out = io.BytesIO()
    soundfile.write(out, samples, RATE, format="WAV", subtype="FLOAT")
    data = base64.b64encode(out.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def ask(mesh: LocalMesh, content: list[str | np.ndarray]) -> dict[str, Any]:
    parts = [{"type": "text", "text": x} if isinstance(x, str) else part(x) for x in content]
    body = {
        "model": "hearing",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": NUM_NEW,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check(reference: Any, kind: str, answer: dict[str, Any], clips: list[np.ndarray]) -> None:
    """Each token is the reference's choice for the prompt with transformers' spectrograms."""
    ids: list[int] = answer["prompt_token_ids"]
    tokens: list[int] = answer["choices"][0]["token_ids"]
    extractor, window = extractor_of(), SECONDS * RATE
    mels, frames = list[torch.Tensor](), list[int]()
    for clip in clips:
        count = -(-len(clip) // window)
        whole = np.pad(clip, (0, count * window - len(clip)))
        made = extractor(whole, sampling_rate=RATE, truncation=False, return_tensors="pt")
        mels += list(made["input_features"][0].split(2 * POSITIONS, dim=1))
        frames += [-(-len(clip) // 160)] * count
    rows = rows_of(reference, ids, mels, frames)
    check_choices(hearing_logits(reference, ids, rows, tokens), tokens, NEAR_TIE)
    counted = answer["usage"]["prompt_tokens_details"]["audio_tokens"]
    assert counted == len(rows)


def test_answers_are_those_of_transformers(mesh: LocalMesh, reference: Any, kind: str) -> None:
    """One to three clips in their places among texts, computed apart; Voxtral's of several
    windows.
    """
    longest = SECONDS * (1 if kind == "qwen2_audio" else 2.6)
    for count in (1, 2, 3):
        clips = [sound(random.uniform(0.1, longest)) for _ in range(count)]
        content = [one for clip in clips for one in (clip, "and")]
        check(reference, kind, ask(mesh, ["What is this?", *content, "?"]), clips)
    assert mesh.counters("decode-0")["encoded_media"] == 0
    assert mesh.counters("prefill-0")["shipped_pages"] > 0


def test_a_clip_heard_before_is_found_again(mesh: LocalMesh, reference: Any, kind: str) -> None:
    """With another question. Another clip with the same question is not taken for it."""
    first, other = sound(SECONDS), sound(SECONDS)
    ask(mesh, [first, "What is it?"])
    again = ask(mesh, [first, "Who says it?"])
    check(reference, kind, again, [first])
    details = again["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] >= 16
    fresh = ask(mesh, [other, "Who says it?"])
    check(reference, kind, fresh, [other])
    assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] < details["cached_tokens"]


def test_words_stand_for_themselves(mesh: LocalMesh, kind: str) -> None:
    spelled = {"voxtral": "[AUDIO]", "qwen2_audio": "<|AUDIO|>"}[kind]
    answer = ask(mesh, [spelled, "x"])
    assert hearing_tokenizer(kind).token_to_id(spelled) not in answer["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens_details"]["audio_tokens"] == 0
