"""When tokens of a transcript are spoken, against transformers' own alignment."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.models.whisper.generation_whisper import _dynamic_time_warping
from weft.checkpoint.config import ModelConfig
from weft.contract.errors import InvalidRequest, ModelError
from weft.contract.messages import Inbox
from weft.contract.spans import Media, MediaSpan
from weft.contract.tasks import PoolingParams
from weft.engine.executor.alignment import frames_of
from weft.engine.loop.llm import LLM
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_whisper import (
    END,
    FIRST_TIME,
    LANGUAGE,
    PREVIOUS,
    SHAPE,
    START,
    TRANSCRIBE,
    check_times,
    make_whisper,
    path_cost,
)

pytestmark = pytest.mark.usefixtures("single_thread")

FRAMES, ROWS, MELS = 2 * SHAPE["max_source_positions"], 128, SHAPE["num_mel_bins"]
HEADS = [[0, 1], [1, 0], [1, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_whisper(tmp_path_factory.mktemp("words") / "model", random.randrange(1 << 30))
    generation = json.loads((path / "generation_config.json").read_text())
    generation["alignment_heads"] = HEADS
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def clip() -> Media:
    mel = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.7, (MELS, FRAMES))
    return Media.of("audio", "test", (MELS, FRAMES, 4), mel.astype("<f4").tobytes())


def transcript() -> tuple[list[int], list[int]]:
    """What precedes a text, and the text with its times."""
    said = [random.randrange(END) for _ in range(random.randint(1, 6))]
    before = [PREVIOUS, *said] if random.random() < 0.5 else []
    words = [random.randrange(END) for _ in range(random.randint(3, 15))]
    times = sorted(random.sample(range(FIRST_TIME, FIRST_TIME + 90), 2))
    return [*before, START, LANGUAGE, TRANSCRIBE], [times[0], *words, times[1]]


def prompt_of(begin: list[int], text: list[int]) -> list[int]:
    return [END] * ROWS + begin + text


def test_a_path_is_that_of_transformers() -> None:
    rng = np.random.default_rng(random.randrange(1 << 30))
    for _ in range(10):
        matrix = rng.normal(size=tuple(rng.integers(1, 40, 2))).astype(np.float32)
        tokens, frames = _dynamic_time_warping(-matrix.astype(np.float64))
        firsts = [int(frames[tokens == one].min()) for one in range(len(matrix))]
        # That sums in float32, and may find a dearer one.
        least = path_cost(-matrix.astype(np.float64), firsts)
        assert path_cost(-matrix.astype(np.float64), frames_of(matrix).tolist()) <= least + 1e-9


@pytest.mark.parametrize("chunk", [512, 32])
def test_times_are_those_of_transformers(folder: Path, reference: Any, chunk: int) -> None:
    """Several clips at once, whole or by chunks that end within a text; a clip that was heard."""
    with LLM(folder, dtype="float32", num_pages=200, prefill_chunk_tokens=chunk) as llm:
        for _ in range(2):
            media, texts = [clip() for _ in range(4)], [transcript() for _ in range(4)]
            llm.put(media)
            frames = random.randint(30, FRAMES // 2)
            for again in range(2):
                for one, (begin, text) in zip(media, texts, strict=True):
                    pool = PoolingParams(
                        output="alignment", aligned_from=ROWS + len(begin), num_frames=frames
                    )
                    span = MediaSpan(position=0, length=ROWS, digest=one.digest)
                    before = llm.engine.counters()["encoded_media"]
                    (found,) = llm.pool([prompt_of(begin, text)], pool, spans=[[span]])
                    assert (llm.engine.counters()["encoded_media"] > before) is not bool(again)
                    assert found.shape == (1, len(text))
                    asked = one.data, [*begin, *text], len(begin), HEADS, frames
                    check_times(found[0].tolist(), reference, *asked)


def test_the_pages_of_a_clip_may_come_from_another_worker(folder: Path, reference: Any) -> None:
    clock = ManualClock()
    owner, filler = (make_engine(folder, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        one, (begin, text) = clip(), transcript()
        filler.turn(Inbox(media=[one]))
        pair.send(media=[one])
        frames, first = random.randint(30, FRAMES // 2), ROWS + len(begin)
        pool = PoolingParams(output="alignment", aligned_from=first, num_frames=frames)
        span = MediaSpan(position=0, length=ROWS, digest=one.digest)
        name = pair.submit(prompt_of(begin, text), 1, spans=[span], pool=pool)
        pair.run(lambda: bool(pair.answers[name].finished))
        (vectors,) = pair.answers[name].vectors
        found = np.frombuffer(vectors.values, "<f4").tolist()
        check_times(found, reference, one.data, [*begin, *text], len(begin), HEADS, frames)
        assert owner.counters()["fills_done"] == 1
        assert owner.counters()["encoded_media"] == 0
        pair.settle()
    finally:
        pair.close()


def test_what_cannot_be_aligned_is_refused(folder: Path) -> None:
    one = clip()
    with LLM(folder, dtype="float32", num_pages=100) as llm:
        llm.put([one])
        ids = prompt_of(*transcript())
        span = MediaSpan(position=0, length=ROWS, digest=one.digest)
        for first, frames in ((0, 10), (ROWS - 1, 10), (len(ids), 10), (ROWS, 0), (ROWS, 101)):
            pool = PoolingParams(output="alignment", aligned_from=first, num_frames=frames)
            with pytest.raises(InvalidRequest, match="must be from"):
                llm.pool([ids], pool, spans=[[span]])


def test_heads_that_do_not_exist_are_refused(folder: Path, tmp_path: Path) -> None:
    for heads in ([[0, 3]], [[2, 0]], [], [0], "all", [[0, 1, 2]]):
        for name in ("config.json", "generation_config.json"):
            values = json.loads((folder / name).read_text())
            if name.startswith("generation"):
                values["alignment_heads"] = heads
            (tmp_path / name).write_text(json.dumps(values))
        with pytest.raises(ModelError, match="alignment_heads"):
            ModelConfig.load(tmp_path)
