"""Prompts with images of any size against transformers, in the forms of Qwen2.5-VL, Qwen3-VL and
Qwen3.5: positions along three axes, and rows that are added to the first layers.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.request import StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_qwen_vl import IDS, IMAGE, SQUARE, make_qwen_vl, qwen_logits

pytestmark = pytest.mark.usefixtures("single_thread")

NEAR_TIE = 1e-4
STOP = StopCriteria(max_tokens=12, ignore_eos=True)
KINDS = ("qwen2_5_vl", "qwen3_vl")


class Prompt(NamedTuple):
    ids: list[int]
    spans: list[MediaSpan]
    media: list[Media]


class Reference:
    """transformers' model in float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self._settings = json.loads((folder / "preprocessor_config.json").read_text())

    def check(self, prompt: Prompt, tokens: list[int], count: int = 12) -> None:
        """Each token is the model's choice, where float32 can tell."""
        assert len(tokens) == count
        by_digest = {one.digest: one for one in prompt.media}
        pictures = [pixels_of(by_digest[span.digest]) for span in prompt.spans]
        logits = qwen_logits(self._model, prompt.ids, tokens, pictures, self._settings)
        check_choices(logits, tokens, NEAR_TIE)

    def check_all(self, prompts: Sequence[Prompt], found: Sequence[list[int]]) -> None:
        for prompt, tokens in zip(prompts, found, strict=True):
            self.check(prompt, tokens)


@pytest.fixture(scope="module", params=KINDS)
def reference(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Reference:
    path = tmp_path_factory.mktemp("images") / request.param
    return Reference(make_qwen_vl(request.param, path, random.randrange(1 << 30)))


def pixels_of(media: Media) -> torch.Tensor:
    return torch.frombuffer(bytearray(media.data), dtype=torch.uint8).view(media.shape)


def picture(most: int = 6) -> Media:
    shape = (random.randint(1, most) * SQUARE, random.randint(1, most) * SQUARE, 3)
    return Media.of("image", "test", shape, random.randbytes(shape[0] * shape[1] * 3))


def rows_of(media: Media) -> int:
    return media.shape[0] * media.shape[1] // SQUARE**2


def text(most: int = 24) -> list[int]:
    return [random.randrange(3, 256) for _ in range(random.randint(1, most))]


def prompt_of(pictures: list[Media], begin: list[int] | None = None) -> Prompt:
    """Text, the pictures with text between some of them, text."""
    ids, spans = list(begin or text()), list[MediaSpan]()
    for one in pictures:
        spans.append(MediaSpan(position=len(ids), length=rows_of(one), digest=one.digest))
        ids += [IDS[IMAGE]] * rows_of(one)
        # transformers takes pictures without text between them for one.
        ids += text()
    return Prompt([*ids, *text()], spans, list({one.digest: one for one in pictures}.values()))


def engine(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"dtype": "float32", "num_pages": 400, **settings})


def run(llm: LLM, *prompts: Prompt) -> list[list[int]]:
    llm.put([one for prompt in prompts for one in prompt.media])
    found = llm.generate(
        [prompt.ids for prompt in prompts], stop=STOP, spans=[prompt.spans for prompt in prompts]
    )
    return [sample.token_ids for sample in found]


@pytest.mark.parametrize("chunk", [256, 16])
def test_tokens_are_those_of_transformers(reference: Reference, chunk: int) -> None:
    """In a batch with text alone, with chunks that hold whole prompts, or end inside of images."""
    prompts = [prompt_of([picture() for _ in range(count)]) for count in (1, 2, 4)]
    with engine(reference.folder, prefill_chunk_tokens=chunk) as llm:
        reference.check_all(prompts, run(llm, *prompts))


@pytest.mark.parametrize("reference", ["qwen3_vl"], indirect=True)
def test_ranks_divide_images_of_many_sizes(reference: Reference) -> None:
    prompts = [prompt_of([picture() for _ in range(count)]) for count in (1, 3)]
    limits = {"rank_timeout_s": 60.0, "check_ranks": True}
    with engine(reference.folder, prefill_chunk_tokens=64, tp=2, **limits) as llm:
        reference.check_all(prompts, run(llm, *prompts))
