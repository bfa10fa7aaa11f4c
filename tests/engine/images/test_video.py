"""Frames of videos against transformers: two to a medium, each pair with its time, whole, by chunks
and computed by another worker.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText
from weft.contract.errors import InvalidRequest
from weft.contract.messages import Inbox
from weft.contract.request import MAX_BIAS, SamplingParams, StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.image_families import MEAN, STD, Prompt, random_picture, text
from weft.testing.models.tiny_qwen_vl import END, IDS, IMAGE, QWEN_FAMILIES, SQUARE, START, VIDEO

pytestmark = pytest.mark.usefixtures("single_thread")

NEAR_TIE = 1e-4
STOP = StopCriteria(max_tokens=10, ignore_eos=True)
PLACES = (IDS[VIDEO], IDS[IMAGE])
GREEDY = SamplingParams(temperature=0.0, logit_bias=dict.fromkeys(PLACES, -MAX_BIAS))
"""Of an answer no token may stand for a frame, since transformers looks for them."""
TOKENS_PER_SECOND = 4


class Film:
    """Random frames of one size, in pairs."""

    def __init__(self, kind: str) -> None:
        self.has_texts = kind == "qwen3_vl"
        self.rows, self.columns = random.randint(1, 4), random.randint(1, 4)
        self.seconds_of_pair = random.choice((0.1, 0.5, 1.0, 3.0))
        height, width = self.rows * SQUARE, self.columns * SQUARE
        self.frames = [
            torch.frombuffer(bytearray(random_picture(height, width).data), dtype=torch.uint8).view(
                height, width, 3
            )
            for _ in range(2 * random.randint(1, 4))
        ]
        pairs = zip(self.frames[::2], self.frames[1::2], strict=True)
        self.media = [
            Media.of("image", "test", (height, width, 6), torch.cat(pair, 2).numpy().tobytes())
            for pair in pairs
        ]

    def put(self, ids: list[int], spans: list[MediaSpan]) -> None:
        if not self.has_texts:
            ids.append(IDS[START])
        for number, one in enumerate(self.media):
            if self.has_texts:
                ids += [*text(3), IDS[START]]
            step = int(torch.tensor(number) * (self.seconds_of_pair * TOKENS_PER_SECOND))
            count = self.rows * self.columns
            span = MediaSpan(
                position=len(ids),
                length=count,
                digest=one.digest,
                shape=one.shape,
                time=0 if self.has_texts or not number else step + 1,
            )
            spans.append(span)
            ids += [IDS[VIDEO]] * count
            if self.has_texts:
                ids.append(IDS[END])
        if not self.has_texts:
            ids.append(IDS[END])

    @property
    def patches(self) -> torch.Tensor:
        """[patches, 3 * 2 * side * side], in the order of transformers' video processors."""
        video = torch.stack(self.frames).permute(0, 3, 1, 2) / 255
        video = (video - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
        side, pairs = SQUARE // 2, len(self.media)
        shape = (pairs, 2, 3, self.rows, 2, side, self.columns, 2, side)
        parts = video.reshape(shape).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return parts.reshape(pairs * self.rows * self.columns * 4, -1)

    @property
    def grid(self) -> list[int]:
        return [len(self.media), 2 * self.rows, 2 * self.columns]


class Case:
    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        vision = {"tokens_per_second": TOKENS_PER_SECOND} if kind == "qwen2_5_vl" else {}
        QWEN_FAMILIES[kind]().make(folder, random.randrange(1 << 30), vision=vision)
        self._model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)

    def prompt(self) -> tuple[Prompt, list[Film]]:
        ids, spans, films = text(), list[MediaSpan](), [Film(self.kind) for _ in range(2)]
        for film in films:
            film.put(ids, spans)
            ids += text()
        return Prompt(ids, spans, [one for film in films for one in film.media]), films

    @torch.no_grad()
    def check(self, prompt: Prompt, films: Sequence[Film], tokens: list[int]) -> None:
        """Each token is the model's choice, where float32 can tell."""
        ids = torch.tensor([[*prompt.ids, *tokens]])
        seconds: dict[str, Any] = {}
        if self.kind == "qwen2_5_vl":
            seconds = {"second_per_grid_ts": [film.seconds_of_pair for film in films]}
        logits = self._model(
            input_ids=ids,
            pixel_values_videos=torch.cat([film.patches for film in films]),
            video_grid_thw=torch.tensor([film.grid for film in films]),
            mm_token_type_ids=2 * (ids == IDS[VIDEO]).int(),
            attention_mask=torch.ones_like(ids),
            **seconds,
        ).logits
        assert len(tokens) == STOP.max_tokens
        logits[..., [*PLACES]] = -1e9
        check_choices(logits[0, len(prompt.ids) - 1 : -1], tokens, NEAR_TIE)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("video") / request.param)


@pytest.mark.parametrize("chunk", [16, 512])
def test_tokens_are_those_of_transformers(case: Case, chunk: int) -> None:
    asked = [case.prompt() for _ in range(3)]
    limits = {"dtype": "float32", "num_pages": 400, "prefill_chunk_tokens": chunk}
    with LLM(case.folder, **limits) as llm:
        for _ in range(2):  # The second time pages are found by their keys.
            llm.put([one for prompt, _ in asked for one in prompt.media])
            ids, spans = [one.ids for one, _ in asked], [one.spans for one, _ in asked]
            for (prompt, films), sample in zip(
                asked, llm.generate(ids, GREEDY, STOP, spans=spans), strict=True
            ):
                case.check(prompt, films, sample.token_ids)


def test_pages_of_frames_may_come_from_another_worker(case: Case) -> None:
    clock = ManualClock()
    owner, filler = (make_engine(case.folder, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        prompt, films = case.prompt()
        filler.turn(Inbox(media=list(prompt.media)))
        pair.send(media=list(prompt.media))
        name = pair.submit(prompt.ids, STOP.max_tokens, spans=prompt.spans, sampling=GREEDY)
        (tokens,) = pair.finish(name)
        case.check(prompt, films, tokens)
        assert owner.counters()["fills_done"] == 1
        pair.settle()
    finally:
        pair.close()


def test_frames_that_follow_none_are_refused(case: Case) -> None:
    one = Film(case.kind).media[0]
    count = one.shape[0] * one.shape[1] // SQUARE**2
    with LLM(case.folder, dtype="float32", num_pages=100) as llm:
        llm.put([one])
        for time in (1, 5000):
            ids = [IDS[START], *[IDS[VIDEO]] * (2 * count), IDS[END]]
            first = MediaSpan(position=1, length=count, digest=one.digest, shape=one.shape)
            at = 1 + count if time > 1 else 2 + count
            then = MediaSpan(
                position=at, length=count, digest=one.digest, shape=one.shape, time=time
            )
            with pytest.raises(InvalidRequest, match="video"):
                llm.generate([[*ids, *text()]], stop=STOP, spans=[[first, then]])
