"""Images through a whole mesh: from a client's bytes over the media processes, a prefill worker and
the KV store to an answer, which is transformers'.
"""

from __future__ import annotations

import base64
import io
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    Idefics3Processor,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from weft.contract.codec.pairs import FAULT
from weft.contract.faults import FaultSpec
from weft.testing.meshes.local_mesh import LocalMesh, wait_until
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_vision import CHAT_TEMPLATE, image_logits, make_vision
from weft.v1 import admin_pb2

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(400)]

NUM_NEW = 20
NEAR_TIE = 3e-5
"""A tower adds its roundings to those of the language model."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "seeing"
    return make_vision("idefics3", folder, random.randrange(2**31))


@pytest.fixture(
    scope="module",
    params=[" --language-model-only", pytest.param("", marks=pytest.mark.full)],
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
    flags = ("--model", str(model_dir), "--dtype", "float32", "--kvstore", "1", "--enable-faults")
    flags += ("--local-prefill-max-tokens", "0", "--decode-args", PATIENT + request.param)
    flags += ("--prefill-args", "--prefill-chunk-tokens 32")
    mesh = LocalMesh(tmp_path_factory.mktemp("mesh"), *flags)
    with mesh.serving():
        yield mesh


class Reference:
    """transformers' processor and model in float32."""

    def __init__(self, folder: Path) -> None:
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        whole = json.loads((folder / "processor_config.json").read_text())
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            pad_token="<|im_end|>",
            eos_token="<end_of_utterance>",
        )
        self._processor = Idefics3Processor(
            Idefics3ImageProcessorPil(
                size=settings["size"],
                max_image_size=settings["max_image_size"],
                image_mean=settings["image_mean"],
                image_std=settings["image_std"],
            ),
            tokenizer,
            image_seq_len=whole["image_seq_len"],
            chat_template=CHAT_TEMPLATE,
        )
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def check(self, content: list[str | Image.Image], tokens: list[int]) -> int:
        """Each token of the answer to one message of texts and images is the model's choice, where
        float32 can tell. Returns the tokens of the prompt.
        """
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image"}
            for part in content
        ]
        images = [part for part in content if not isinstance(part, str)]
        text = self._processor.apply_chat_template(
            [{"role": "user", "content": parts}], add_generation_prompt=True
        )
        inputs = self._processor(text=text, images=[images], return_tensors="pt")
        prompt = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask")
        check_choices(image_logits(self._model, prompt, tokens, **inputs), tokens, NEAR_TIE)
        return len(prompt)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Reference:
    return Reference(model_dir)


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng().integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def url_of(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def body(content: list[str | Image.Image], count: int = NUM_NEW, **more: Any) -> dict[str, Any]:
    parts = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url_of(part)}}
        for part in content
    ]
    return {
        "model": "seeing",
        "messages": [{"role": "user", "content": parts}],
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def ask(mesh: LocalMesh, content: list[str | Image.Image], **more: Any) -> dict[str, Any]:
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body(content, **more), timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def ask_again(mesh: LocalMesh, content: list[str | Image.Image]) -> dict[str, Any]:
    """Asks as long as no worker with a tower is known to be ready, which is said to be for now."""
    deadline = time.monotonic() + 60
    while True:
        answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body(content), timeout=120)
        if answer.status_code != 503 or time.monotonic() > deadline:
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found
        assert "send the request again" in answer.text
        time.sleep(0.2)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def test_answers_are_those_of_transformers(mesh: LocalMesh, reference: Reference) -> None:
    """One to three images of several sizes, in their places among texts, computed apart."""
    before = mesh.counters("prefill-0")["shipped_pages"]
    for content in (
        ["What is this?", picture(64, 64)],
        [picture(200, 90), "and", picture(40, 130), "What differs?"],
        [picture(20, 30), picture(256, 256), "first", picture(70, 64), "?"],
    ):
        answer = ask(mesh, content)
        num_tokens = reference.check(content, tokens_of(answer))
        assert answer["usage"]["prompt_tokens"] == num_tokens

    def has_shipped() -> bool:
        return bool(mesh.counters("prefill-0")["shipped_pages"] > before)

    assert mesh.counters("decode-0")["encoded_media"] == 0
    wait_until(has_shipped, 10, "pages have been shipped")


def test_an_image_seen_before_is_found_again(mesh: LocalMesh, reference: Reference) -> None:
    """With another question. Another image with the same question is not taken for it."""
    image, other = picture(150, 150), picture(150, 150)
    ask(mesh, [image, "What is it?"])
    again = ask(mesh, [image, "Which colour has it?"])
    num_tokens = reference.check([image, "Which colour has it?"], tokens_of(again))
    assert cached(again) > num_tokens // 2
    fresh = ask(mesh, [other, "Which colour has it?"])
    reference.check([other, "Which colour has it?"], tokens_of(fresh))
    assert cached(fresh) < num_tokens // 4


@pytest.mark.full
def test_pages_of_images_come_back_from_the_store(mesh: LocalMesh, reference: Reference) -> None:
    """When neither worker has them any more. Another image in the same place finds none."""
    content: list[str | Image.Image] = [picture(150, 150), "What is it?"]
    num_tokens = reference.check(content, tokens_of(ask(mesh, content)))
    num_pages = num_tokens // 16 - 1

    def are_stored() -> bool:
        with mesh.operators("prefill-0") as (stub, metadata):
            stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata, timeout=30)
        with mesh.operators("decode-0") as (stub, metadata):
            stub.FlushCache(admin_pb2.FlushCacheRequest(), metadata=metadata, timeout=30)
        before = mesh.counters("decode-0")["store_hit_pages"]
        reference.check(content, tokens_of(ask(mesh, content)))
        return bool(mesh.counters("decode-0")["store_hit_pages"] >= before + num_pages)

    wait_until(are_stored, 60, "the store has the pages")
    found = mesh.counters("decode-0")["store_hit_pages"]
    other: list[str | Image.Image] = [picture(150, 150), "What is it?"]
    reference.check(other, tokens_of(ask(mesh, other)))
    assert mesh.counters("decode-0")["store_hit_pages"] < found + num_pages


@pytest.mark.parametrize(
    ("victim", "process"),
    [
        ("decode-0", "engine_pid"),
        pytest.param("decode-0", "pid", marks=pytest.mark.full),
        pytest.param("prefill-0", "pid", marks=pytest.mark.full),
    ],
)
def test_an_answer_survives_a_worker(
    victim: str, process: str, mesh: LocalMesh, reference: Reference
) -> None:
    """A worker is killed in the middle of it. The owner's successor was never brought the image."""
    content: list[str | Image.Image] = [picture(100, 180), "Tell me all."]
    ids: list[int] = []
    with httpx.stream(
        "POST",
        f"{mesh.url}/v1/chat/completions",
        json=body(content, 400, stream=True),
        timeout=120,
    ) as answer:
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
                os.kill(mesh.service(victim)[process], signal.SIGKILL)
    assert len(ids) == 400
    reference.check(content, ids)
    mesh.wait_healthy()
    wait_until(lambda: mesh.is_idle("decode-0"), 60, "the worker is idle")


def test_a_prompt_survives_the_worker_that_computes_it(
    mesh: LocalMesh, reference: Reference
) -> None:
    """A prefill worker is killed when its owner has got the first pages of an image. The worker's
    successor is brought the images again.
    """
    content: list[str | Image.Image] = [picture(256, 256), "and", picture(250, 250), "What is it?"]
    before = mesh.counters("decode-0")["accepted_pages"]
    held = FaultSpec(point="engine.step", kind="delay", count=0, skip=4, delay_s=60.0)
    arm(mesh, "prefill-0", held)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask_again, mesh, content)

        def has_pages() -> bool:
            return bool(mesh.counters("decode-0")["accepted_pages"] > before)

        wait_until(has_pages, 60, "the owner has the first pages")
        assert not answer.done()
        os.kill(mesh.service("prefill-0")["pid"], signal.SIGKILL)
        reference.check(content, tokens_of(answer.result(120)))
    mesh.wait_healthy()
    wait_until(lambda: mesh.is_idle("decode-0"), 60, "the worker is idle")


def arm(mesh: LocalMesh, name: str, fault: FaultSpec) -> None:
    with mesh.operators(name) as (stub, metadata):
        request = admin_pb2.InjectFaultRequest(fault=FAULT.encode(fault))
        stub.InjectFault(request, metadata=metadata, timeout=60)


def test_a_prefill_worker_that_was_restarted_is_brought_the_images(
    mesh: LocalMesh, reference: Reference
) -> None:
    content: list[str | Image.Image] = [picture(64, 64), "What is this?"]
    ask(mesh, content)
    os.kill(mesh.service("prefill-0")["engine_pid"], signal.SIGKILL)
    mesh.wait_healthy()
    content = [content[0], picture(90, 64), "And these?"]
    reference.check(content, tokens_of(ask_again(mesh, content)))
