"""Models that hear against transformers: rows of clips, tokens in batches, chunks that end inside
of clips, cached prefixes, clips of several lengths.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from weft.contract.errors import InvalidRequest
from weft.contract.messages import Inbox
from weft.contract.request import StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.tiny_hearing import (
    MELS,
    POSITIONS,
    Clip,
    HearingModel,
    Prompt,
    load_hearing,
    rows_of,
    text,
)

pytestmark = pytest.mark.usefixtures("single_thread")

FRAMES = 2 * POSITIONS
STOP = StopCriteria(max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module", params=["voxtral", "qwen2_audio"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HearingModel:
    kind: str = request.param
    return load_hearing(kind, tmp_path_factory.mktemp("hears") / kind, random.randrange(1 << 30))


def run(llm: LLM, *prompts: Prompt) -> list[list[int]]:
    llm.put([one.media for prompt in prompts for one in prompt.clips])
    found = llm.generate(
        [prompt.ids for prompt in prompts], stop=STOP, spans=[prompt.spans for prompt in prompts]
    )
    return [sample.token_ids for sample in found]


def engine(model: HearingModel, **settings: Any) -> LLM:
    return LLM(model.folder, dtype="float32", num_pages=200, **settings)


def tensors_of(clips: Sequence[Clip]) -> list[torch.Tensor]:
    return [
        torch.frombuffer(bytearray(one.media.data), dtype=torch.uint8).view(one.media.shape)
        for one in clips
    ]


def test_rows_are_those_of_transformers(model: HearingModel) -> None:
    """Together, and bit by bit the same alone."""
    encoder = load_model(model.folder, "float32", images=True).encoder
    assert encoder is not None
    clips = [model.clip() for _ in range(4)]
    prompt = model.prompt(clips)
    with torch.inference_mode():
        rows = encoder.encode(tensors_of(clips))
        mels, frames = [one.whole for one in clips], [one.num_frames for one in clips]
        wanted = rows_of(model.reference, prompt.ids, mels, frames)
        torch.testing.assert_close(rows, wanted, rtol=1e-4, atol=1e-4)
        for one, own in zip(clips, rows.split([one.num_rows for one in clips]), strict=True):
            assert encoder.rows_of(one.media.shape) == one.num_rows
            assert torch.equal(encoder.encode(tensors_of([one])), own)


@pytest.mark.parametrize("chunk", [256, 16])
def test_tokens_are_those_of_transformers(model: HearingModel, chunk: int) -> None:
    """In a batch, with chunks that hold whole prompts, or end inside of clips."""
    prompts = [model.prompt([model.clip() for _ in range(count)]) for count in (1, 2, 3)]
    with engine(model, prefill_chunk_tokens=chunk) as llm:
        for prompt, tokens in zip(prompts, run(llm, *prompts), strict=True):
            model.check(prompt, tokens)


def test_cached_prefixes_are_those_of_the_same_clips(model: HearingModel) -> None:
    """A clip is found again, up to a page inside of it; another one in its place is not."""
    begin, first, second = text(), model.clip(), model.clip()
    while second.num_rows != first.num_rows:
        second = model.clip()
    with engine(model, prefill_chunk_tokens=32) as llm:
        for clip in (first, second, first):
            prompt = model.prompt([clip], begin)
            (tokens,) = run(llm, prompt)
            model.check(prompt, tokens)


@pytest.mark.full
def test_ranks_divide_the_language_model_and_the_clips(model: HearingModel) -> None:
    """Each has the whole tower, and encodes some of a step's clips."""
    prompts = [model.prompt([model.clip() for _ in range(count)]) for count in (1, 3)]
    with engine(model, tp=2) as llm:
        for prompt, tokens in zip(prompts, run(llm, *prompts), strict=True):
            model.check(prompt, tokens)


@pytest.mark.parametrize("has_tower", [True, False])
def test_a_prefill_worker_fills_pages_of_clips(model: HearingModel, has_tower: bool) -> None:
    """The owner computes the rest, also where the last page ends within a clip."""
    clock = ManualClock()
    owner = make_engine(model.folder, "decode", clock, language_model_only=not has_tower)
    filler = make_engine(model.folder, "prefill", clock)
    pair = EnginePair(owner, [filler], clock)
    try:
        for count in (1, 2):
            prompt = model.prompt([model.clip() for _ in range(count)])
            end = prompt.spans[-1].end
            for ids in (prompt.ids + text(), [*prompt.ids[:end], 5, 6]):
                asked = Prompt(list(ids), prompt.spans, prompt.clips)
                media = [one.media for one in asked.clips]
                before = owner.counters()["fills_done"]
                filler.turn(Inbox(media=media))
                if has_tower:
                    pair.send(media=media)
                spans, salt = list(asked.spans), str(ids)
                name = pair.submit(asked.ids, STOP.max_tokens, spans=spans, cache_salt=salt)
                (tokens,) = pair.finish(name)
                model.check(asked, tokens)
                assert owner.counters()["fills_done"] > before
        pair.settle()
    finally:
        pair.close()


def test_clips_of_another_form_are_refused(model: HearingModel) -> None:
    with engine(model) as llm:
        for shape in (
            (MELS + 1, FRAMES, 4),
            (MELS, FRAMES + 1, 4),
            (MELS, 3, 4),
            (MELS, FRAMES, 3),
        ):
            media = Media.of("audio", "test", shape, bytes(shape[0] * shape[1] * shape[2]))
            span = MediaSpan(position=2, length=1, digest=media.digest)
            llm.put([media])
            with pytest.raises(InvalidRequest, match="shape"):
                llm.generate([[5] * 6], stop=STOP, spans=[[span]])
        one = model.clip()
        span = MediaSpan(position=2, length=one.num_rows + 1, digest=one.media.digest)
        llm.put([one.media])
        with pytest.raises(InvalidRequest, match="rows"):
            llm.generate([[5] * 200], stop=STOP, spans=[[span]])
