"""Whisper in the engine against transformers: rows of clips, tokens in batches and by chunks, with
and without time tokens, cached clips, prompts that are refused.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from weft.contract.errors import InvalidRequest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria, TimeTokens
from weft.contract.spans import Media, MediaSpan
from weft.engine.loop.llm import LLM
from weft.engine.model.loader import load_model
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.choices import check_choices
from weft.testing.models.tiny_whisper import (
    END,
    FIRST_TIME,
    LANGUAGE,
    NO_TIMES,
    PREVIOUS,
    SHAPE,
    START,
    TRANSCRIBE,
    make_whisper,
)

pytestmark = pytest.mark.usefixtures("single_thread")

FRAMES, ROWS, MELS = 2 * SHAPE["max_source_positions"], 128, SHAPE["num_mel_bins"]
GREEDY, STOP = SamplingParams(temperature=0.0), StopCriteria(max_tokens=10, ignore_eos=True)
NEAR_TIE = 3e-5
"""An encoder adds its roundings to those of the decoder."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("audio") / "model", random.randrange(1 << 30))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Any:
    with LLM(folder, dtype="float32", num_pages=200, prefill_chunk_tokens=48) as made:
        yield made


def clip() -> Media:
    mel = np.random.default_rng(random.randrange(1 << 30)).normal(0, 0.7, (MELS, FRAMES))
    return Media.of("audio", "test", (MELS, FRAMES, 4), mel.astype("<f4").tobytes())


def mel_of(media: Media) -> torch.Tensor:
    return torch.frombuffer(bytearray(media.data), dtype=torch.float32).view(1, MELS, FRAMES)


def span_of(media: Media, **fields: int) -> MediaSpan:
    return MediaSpan(**{"position": 0, "length": ROWS, **fields}, digest=media.digest)


def start(*, times: bool = False) -> list[int]:
    """A prompt with what was said before, in half of the cases."""
    words = [random.randrange(END) for _ in range(random.randint(1, 12))]
    before = [PREVIOUS, *words] if random.random() < 0.5 else []
    begin = [*before, START, LANGUAGE, TRANSCRIBE]
    return begin if times else [*begin, NO_TIMES]


def generate(
    llm: LLM, clips: list[Media], starts: list[list[int]], sampling: SamplingParams = GREEDY
) -> list[list[int]]:
    llm.put(clips)
    found = llm.generate(
        [[END] * ROWS + begin for begin in starts],
        sampling,
        STOP,
        spans=[[span_of(one)] for one in clips],
    )
    return [sample.token_ids for sample in found]


def logits_of(reference: Any, media: Media, begin: list[int], tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab]: logits ahead of each token."""
    ids = torch.tensor([[*begin, *tokens[:-1]]])
    with torch.inference_mode():
        logits = reference(input_features=mel_of(media), decoder_input_ids=ids).logits[0]
    return logits[len(begin) - 1 :]


def test_rows_are_those_of_transformers(folder: Path, reference: Any) -> None:
    encoder = load_model(folder, "float32", images=True).encoder
    clips = [clip(), clip()]
    pixels = [
        torch.frombuffer(bytearray(one.data), dtype=torch.uint8).view(one.shape) for one in clips
    ]
    assert encoder is not None
    with torch.inference_mode():
        rows = encoder.encode(pixels).view(2, ROWS, -1)
        for own, one in zip(rows, clips, strict=True):
            wanted = reference.model.encoder(mel_of(one)).last_hidden_state[0]
            torch.testing.assert_close(own[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)
            assert not own[len(wanted) :].any()
        assert torch.equal(encoder.encode(pixels[1:]), rows[1])


def test_tokens_are_those_of_transformers(llm: LLM, reference: Any) -> None:
    """Several clips at once, whose chunks end inside of them."""
    clips, starts = [clip() for _ in range(5)], [start() for _ in range(5)]
    for one, begin, tokens in zip(clips, starts, generate(llm, clips, starts), strict=True):
        assert len(tokens) == STOP.max_tokens
        check_choices(logits_of(reference, one, begin, tokens), tokens, NEAR_TIE)


def test_a_clip_that_was_heard_is_not_encoded_again(llm: LLM, reference: Any) -> None:
    one, first, second = clip(), start(), start()
    generate(llm, [one], [first])
    (tokens,) = generate(llm, [one], [second])
    check_choices(logits_of(reference, one, second, tokens), tokens, NEAR_TIE)


@pytest.mark.parametrize("max_initial", [None, 20])
def test_times_follow_the_rules_of_transformers(
    llm: LLM, reference: Any, max_initial: int | None
) -> None:
    """Each token is the largest of what transformers' rules leave of the reference's logits."""
    clips, starts = [clip() for _ in range(4)], [start(times=True) for _ in range(4)]
    times = TimeTokens(first=FIRST_TIME, end=END, max_initial=max_initial)
    sampling = SamplingParams(temperature=0.0, time_tokens=times)
    for one, begin, tokens in zip(
        clips, starts, generate(llm, clips, starts, sampling), strict=True
    ):
        config = reference.generation_config
        config.no_timestamps_token_id, config.eos_token_id = NO_TIMES, END
        config.max_initial_timestamp_index = max_initial
        rules = WhisperTimeStampLogitsProcessor(config, begin_index=len(begin))
        rows = logits_of(reference, one, begin, tokens)
        for count, row in enumerate(rows):
            ids = torch.tensor([[*begin, *tokens[:count]]])
            allowed = rules(ids, row[None].clone())[0]
            best = allowed.max()
            # Where sums of all times and another token are near, either is right.
            shares = row.log_softmax(-1)
            tie = shares[FIRST_TIME:].logsumexp(-1) - shares[:FIRST_TIME].max()
            if abs(float(tie)) > 1e-4:
                lack = float(best - allowed[tokens[count]])
                assert lack <= NEAR_TIE * float(row.abs().max()), (count, tokens)


def test_a_prefill_worker_fills_the_pages_of_a_clip(folder: Path, reference: Any) -> None:
    """The owner runs what follows the clip, which may be one token, and hears it again at once."""
    clock = ManualClock()
    owner, filler = (make_engine(folder, role, clock) for role in ("decode", "prefill"))
    pair = EnginePair(owner, [filler], clock)
    try:
        for begin in ([START], start(), [PREVIOUS] * 14 + [START]):
            one = clip()
            filler.turn(Inbox(media=[one]))
            for again in (False, True):
                pair.send(media=[one])
                before = owner.counters()["fills_done"]
                ids = [END] * ROWS + begin
                name = pair.submit(ids, STOP.max_tokens, spans=[span_of(one)])
                (tokens,) = pair.finish(name)
                check_choices(logits_of(reference, one, begin, tokens), tokens, NEAR_TIE)
                assert (owner.counters()["fills_done"] > before) is not again
        assert owner.counters()["encoded_media"] == 0
        pair.settle()
    finally:
        pair.close()


def test_other_prompts_are_refused(llm: LLM) -> None:
    one = clip()
    llm.put([one])
    ids = [END] * ROWS + start()
    wrong: list[tuple[list[int], list[MediaSpan]]] = [
        (ids, []),
        (ids, [span_of(one, position=1)]),
        (ids, [span_of(one, length=ROWS - 1)]),
        (ids[:ROWS], [span_of(one)]),
        (ids * 2, [span_of(one), span_of(one, position=len(ids))]),
    ]
    for prompt, spans in wrong:
        with pytest.raises(InvalidRequest, match=r"one clip|context"):
            llm.generate([prompt], GREEDY, STOP, spans=[spans])
