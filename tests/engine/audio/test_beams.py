"""Beam searches of Whisper against transformers' generate, beside other requests, with little
memory, and after preemptions.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from weft.contract.errors import InvalidRequest
from weft.contract.request import BeamParams, SamplingParams, StopCriteria, TimeTokens
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.engine.requests.request import State
from weft.engine.scheduler.plan import Plan
from weft.testing.models.tiny_whisper import (
    END,
    FIRST_TIME,
    LANGUAGE,
    NO_TIMES,
    SHAPE,
    START,
    TRANSCRIBE,
    make_whisper,
)

pytestmark = pytest.mark.usefixtures("single_thread")

FRAMES, ROWS, MELS = 2 * SHAPE["max_source_positions"], 128, SHAPE["num_mel_bins"]
TIMES = TimeTokens(first=FIRST_TIME, end=END, max_initial=20)
MAX_TOKENS, TIE = 24, 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("beams") / "model", random.randrange(1 << 30))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=["off", "on"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Any:
    with LLM(
        folder, dtype="float32", num_pages=240, prefill_chunk_tokens=48, overlap=request.param
    ) as made:
        yield made


def clip() -> Media:
    mel = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.7, (MELS, FRAMES))
    return Media.of("audio", "test", (MELS, FRAMES, 4), mel.astype("<f4").tobytes())


def prompt(*, times: bool) -> list[int]:
    """What follows the clip, with words before it, so that it may end anywhere in a page."""
    words = [random.randrange(END) for _ in range(random.choice((0, random.randint(1, 12))))]
    return [*words, START, LANGUAGE, TRANSCRIBE, *([] if times else [NO_TIMES])]


def searching(width: int, *, times: bool = False, **fields: float) -> SamplingParams:
    beams = BeamParams(width=width, **fields)
    return SamplingParams(temperature=0.0, beams=beams, time_tokens=TIMES if times else None)


def generate(
    llm: LLM,
    clips: list[Media],
    begins: list[list[int]],
    sampling: SamplingParams | list[SamplingParams],
    stops: tuple[int, ...] = (),
) -> list[Any]:
    llm.put(clips)
    return llm.generate(
        [[END] * ROWS + begin for begin in begins],
        sampling,
        StopCriteria(max_tokens=MAX_TOKENS, stop_token_ids=stops),
        0,
        spans=[[MediaSpan(position=0, length=ROWS, digest=one.digest)] for one in clips],
    )


def searched(
    reference: Any,
    media: Media,
    begin: list[int],
    stops: tuple[int, ...],
    *,
    times: bool,
    **fields: Any,
) -> tuple[list[int], float]:
    """Tokens and score by transformers. Its own class would cut files and prompts anew."""
    mel = torch.frombuffer(bytearray(media.data), dtype=torch.float32).view(1, MELS, FRAMES)
    config = reference.generation_config
    config.no_timestamps_token_id, config.eos_token_id = NO_TIMES, END
    config.max_initial_timestamp_index, config.max_length = TIMES.max_initial, None
    rules = [WhisperTimeStampLogitsProcessor(config, begin_index=len(begin))] if times else []
    found = GenerationMixin.generate(
        reference,
        mel,
        decoder_input_ids=torch.tensor([begin]),
        logits_processor=rules,
        renormalize_logits=True,
        early_stopping=True,
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=[END, *stops],
        pad_token_id=END,
        return_dict_in_generate=True,
        output_scores=True,
        **fields,
    )
    tokens = found.sequences[0, len(begin) :].tolist()
    ends = [at for at, one in enumerate(tokens) if one in (END, *stops)]
    return tokens[: ends[0] + 1] if ends else tokens, float(found.sequences_scores[0])


@pytest.mark.each_of("llm", "width", "times")
@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (3, 0.0), (5, 1.0), (4, -0.5)])
@pytest.mark.parametrize("times", [False, True])
def test_texts_are_those_of_transformers(
    llm: LLM, reference: Any, width: int, penalty: float, *, times: bool
) -> None:
    """Tokens and scores, several searches at once, some of which end by a token."""
    clips, begins = [clip() for _ in range(3)], [prompt(times=times) for _ in range(3)]
    stops = tuple(random.sample(range(END), random.choice((0, 12))))
    sampling = searching(width, times=times, length_penalty=penalty)
    for one, begin, found in zip(
        clips, begins, generate(llm, clips, begins, sampling, stops), strict=True
    ):
        wanted, score = searched(
            reference,
            one,
            begin,
            stops,
            times=times,
            num_beams=width,
            length_penalty=penalty,
        )
        tokens, logprobs = found.token_ids, [entry.logprob for entry in found.logprobs]
        own = sum(logprobs) / len(tokens) ** penalty
        assert abs(own - score) < TIE * max(1.0, abs(score))
        if tokens != wanted:  # Two texts whose scores float32 cannot tell apart.
            assert len(tokens) == len(logprobs)
            continue
        assert (found.finish_reason == "stop") is (tokens[-1] in (END, *stops))


def test_patience_never_finds_a_worse_text(llm: LLM) -> None:
    one, begin, stops = clip(), prompt(times=False), tuple(random.sample(range(END), 40))
    scores = []
    for patience in (0.2, 1.0, 3.0):
        (found,) = generate(llm, [one], [begin], searching(5, patience=patience), stops)
        scores.append(sum(entry.logprob for entry in found.logprobs) / len(found.token_ids))
    assert scores == sorted(scores)


def test_other_requests_run_beside_it(llm: LLM) -> None:
    """Texts are those of requests that run alone, though there are pages for few at a time."""
    clips, begins = [clip() for _ in range(9)], [prompt(times=True) for _ in range(9)]
    kinds = [
        searching(5, times=True),
        SamplingParams(temperature=0.0, time_tokens=TIMES),
        SamplingParams(temperature=0.9, seed=random.randrange(1 << 30), time_tokens=TIMES),
    ]
    sampling = [kinds[number % 3] for number in range(9)]
    alone = [
        generate(llm, [one], [begin], [how])[0].token_ids
        for one, begin, how in zip(clips, begins, sampling, strict=True)
    ]
    llm.engine.turn()
    together = generate(llm, clips, begins, sampling)
    assert [one.token_ids for one in together] == alone
    sizes = llm.engine.sizes()
    assert not any(sizes[name] for name in ("groups", "slots", "sampling_slots", "running"))
    assert llm.engine.memory.counts().used == 0


def test_a_search_that_loses_its_pages_begins_anew(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any of its texts may be chosen, at any step, also while a step is under way."""
    clips, begins = [clip() for _ in range(2)], [prompt(times=True) for _ in range(2)]
    wanted = [
        generate(llm, [one], [begin], searching(4, times=True))[0].token_ids
        for one, begin in zip(clips, begins, strict=True)
    ]
    scheduler = llm.engine.scheduler
    plan, left = scheduler.plan, [3]

    def planned(now: float) -> Plan:
        running = [one for one in scheduler.running if one.num_generated]
        if left[0] and running and random.random() < 0.2:
            left[0] -= 1
            victim = random.choice(running)
            beams = victim.beams
            assert beams is not None
            first = beams.requests[0]
            scheduler.preempt(victim)
            assert first.state is State.PREEMPTED
            assert first.num_generated == 0
        return plan(now)

    monkeypatch.setattr(scheduler, "plan", planned)
    found = generate(llm, clips, begins, searching(4, times=True))
    assert [one.token_ids for one in found] == wanted
    assert llm.engine.memory.counts().used == 0


def test_what_cannot_be_searched_is_refused(llm: LLM) -> None:
    one, begin = clip(), prompt(times=False)
    beams = BeamParams(width=5)
    for sampling, told in (
        (SamplingParams(temperature=0.5, beams=beams), "temperature"),
        (SamplingParams(temperature=0.0, n=2, beams=beams), "n above 1"),
        (SamplingParams(temperature=0.0, presence_penalty=1.0, beams=beams), "penalties"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            generate(llm, [one], [begin], sampling)
    with pytest.raises(InvalidRequest, match="candidates"):
        generate(llm, [one], [begin], searching(16), tuple(range(30)))


def test_an_engine_without_room_for_one_refuses_it(folder: Path) -> None:
    with LLM(folder, dtype="float32", num_pages=13, max_running_requests=4) as llm:
        one, begin = clip(), [START, LANGUAGE, TRANSCRIBE, NO_TIMES]
        with pytest.raises(InvalidRequest, match="at most 4 texts"):
            generate(llm, [one], [begin], searching(5))
        with pytest.raises(InvalidRequest, match="16 pages of KV, of 12"):
            generate(llm, [one], [begin], searching(4))
        (found,) = generate(llm, [one], [begin], searching(2))
        assert found.token_ids
