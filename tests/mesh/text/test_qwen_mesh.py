"""Images of any size through a whole mesh, with rotations along three axes: computed by a prefill
worker, continued by a decode worker, and resumed after its death.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from weft.contract.spans import Media, MediaSpan
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import Prompt
from weft.testing.models.tiny_qwen_vl import (
    CHAT_TEMPLATE,
    IDS,
    IMAGE,
    SQUARE,
    Qwen3Vl,
    Qwen35,
    QwenVl,
)

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400), pytest.mark.full]

NUM_NEW = 20
NEAR_TIE = 1e-4


@pytest.fixture(scope="module", params=[Qwen3Vl, Qwen35], ids=lambda family: family.__name__)
def family(request: pytest.FixtureRequest) -> QwenVl:
    found: QwenVl = request.param()
    return found


@pytest.fixture(scope="module")
def model_dir(family: QwenVl, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family.make(tmp_path_factory.mktemp("images") / "seeing", random.randrange(2**31))


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
    """Prompts are computed by the prefill worker. The decode worker has no image tower, or one that
    it does not need.
    """
    flags = ("--model", str(model_dir), "--dtype", "float32", "--local-prefill-max-tokens", "0")
    mesh = LocalMesh(
        tmp_path_factory.mktemp("mesh"), *flags, "--decode-args", PATIENT + request.param
    )
    with mesh.serving():
        yield mesh


def check(family: QwenVl, folder: Path, content: list[str | Image.Image], tokens: list[int]) -> int:
    """Each token is the choice of transformers' model, where float32 can tell. Returns the tokens
    of the prompt.
    """
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    parts = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
        for part in content
    ]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}],
        chat_template=CHAT_TEMPLATE,
        add_generation_prompt=True,
        tokenize=False,
    )
    bounds = json.loads((folder / "preprocessor_config.json").read_text())["size"].values()
    ids, spans, media = list[int](), list[MediaSpan](), list[Media]()
    images = iter(part for part in content if not isinstance(part, str))
    for id_ in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if id_ != IDS[IMAGE]:
            ids.append(id_)
            continue
        image = next(images)
        height, width = smart_resize(image.height, image.width, SQUARE, *bounds)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        media.append(Media.of("image", "oracle", (height, width, 3), resized.tobytes()))
        count = height * width // SQUARE**2
        spans.append(MediaSpan(position=len(ids), length=count, digest=media[-1].digest))
        ids += [id_] * count
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    check_choices(family.logits(model, Prompt(ids, spans, media), tokens), tokens, NEAR_TIE)
    return len(ids)


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def body(content: list[str | Image.Image], count: int = NUM_NEW, **more: Any) -> dict[str, Any]:
    parts: list[dict[str, Any]] = []
    for part in content:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
            continue
        file = io.BytesIO()
        part.save(file, "PNG")
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        parts.append({"type": "image_url", "image_url": {"url": url}})
    return {
        "model": "seeing",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def test_answers_are_those_of_transformers(
    mesh: LocalMesh, family: QwenVl, model_dir: Path
) -> None:
    for content in (
        ["What is this?", picture(64, 64)],
        [picture(200, 90), "and", picture(40, 130), "What differs?"],
        [picture(20, 30), "a", picture(56, 56), "first", picture(70, 64), "?"],
    ):
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body(content), timeout=120)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        num_tokens = check(family, model_dir, content, found["choices"][0]["token_ids"])
        assert found["usage"]["prompt_tokens"] == num_tokens


def test_an_answer_survives_its_worker(mesh: LocalMesh, family: QwenVl, model_dir: Path) -> None:
    """The decode worker's engine is killed in the middle. Its successor was never brought the
    image, and rotates the tokens so far by the same rule.
    """
    content: list[str | Image.Image] = [picture(100, 180), "Tell me all."]
    ids: list[int] = []
    url, asked = f"{mesh.url}/v1/chat/completions", body(content, 200, stream=True)
    with httpx.stream("POST", url, json=asked, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            before = len(ids)
            for choice in event["choices"]:
                ids += choice.get("token_ids") or []
            if before < 20 <= len(ids):
                os.kill(mesh.service("decode-0")["engine_pid"], signal.SIGKILL)
    assert len(ids) == 200
    check(family, model_dir, content, ids)
