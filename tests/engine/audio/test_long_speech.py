"""Files of several clips against transformers' generate: where clips begin, what they are told of
the text before, tokens, tokens that are never drawn, log-probabilities.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from weft.contract.request import SamplingParams, StopCriteria
from weft.contract.spans import Media, MediaSpan
from weft.contract.tasks import PoolingParams
from weft.engine.loop.llm import LLM
from weft.gateway.api.audio import transcribe
from weft.gateway.api.audio.bodies import SpeechBody
from weft.gateway.api.audio.segments import Segment
from weft.gateway.api.audio.transcribe import SpeechOrder, Transcription
from weft.gateway.media.audio import PROCESSOR, log_mel
from weft.gateway.media.clips import Spectrogram
from weft.gateway.request import CallFacts
from weft.gateway.text.speech import load_speech
from weft.testing.models.tiny_speech import (
    CONTEXT,
    NUM_POSITIONS,
    NUM_ROWS,
    TOKENS,
    make_talker,
    speech_tokenizer,
)
from weft.testing.models.tiny_whisper import check_times, in_float64

pytestmark = pytest.mark.usefixtures("single_thread")

RATE, FRAMES = 16_000, 2 * NUM_POSITIONS
TOKENIZER = speech_tokenizer()
ID = {token: TOKENIZER.token_to_id(token) for token in TOKENS}
END, START, FIRST = ID["<|endoftext|>"], ID["<|startoftranscript|>"], ID["<|notimestamps|>"] + 1
TIE = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talker(tmp_path_factory.mktemp("speech") / "model", random.randrange(1 << 30))


class Pipeline:
    """Runs requests of a transcription in an engine of this process, and keeps them."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.asked: list[tuple[Media, list[int], Any]] = []
        """Clip, prompt after it and first sample of each."""
        self.aligned: list[tuple[Media, list[int], PoolingParams, list[float]]] = []
        """Clip, prompt, what was asked and the answer."""

    @asynccontextmanager
    async def open(self, raw: Any) -> AsyncIterator[Any]:
        (prompt,), given = raw.prompts, raw.given
        self._llm.put([prompt.clip])
        if raw.pooling is not None:
            yield self._aligned(prompt, raw.pooling)
            return
        sampling = SamplingParams(
            temperature=given["temperature"],
            seed=given["seed"],
            n=given.get("n", 1),
            logit_bias=given.get("logit_bias", {}),
            time_tokens=raw.time_tokens,
            beams=raw.beams,
        )
        samples = self._draw(prompt, sampling, given)
        if raw.time_tokens is not None:
            self.asked.append((prompt.clip, list(prompt.ids[NUM_ROWS:]), samples[0]))
        deltas = [
            SimpleNamespace(sample=number, ids=one.token_ids, logprobs=one.logprobs)
            for number, one in enumerate(samples)
        ]
        answers = [deltas, []]

        async def next_deltas() -> Any:
            return answers.pop(0)

        yield SimpleNamespace(next_deltas=next_deltas)

    def _draw(self, prompt: Any, sampling: SamplingParams, given: Any) -> list[Any]:
        (samples,) = self._llm.generate_all(
            [list(prompt.ids)],
            sampling,
            StopCriteria(max_tokens=given["max_tokens"]),
            given["top_logprobs"],
            spans=[[MediaSpan(position=0, length=NUM_ROWS, digest=prompt.clip.digest)]],
        )
        return samples

    def _aligned(self, prompt: Any, wanted: Any) -> Any:
        """What a gateway has of an answer with vectors."""
        fields = ("output", "aligned_from", "num_frames")
        pool = PoolingParams(**{name: getattr(wanted, name) for name in fields})
        span = MediaSpan(position=0, length=NUM_ROWS, digest=prompt.clip.digest)
        (made,) = self._llm.pool([list(prompt.ids)], pool, spans=[[span]])
        self.aligned.append((prompt.clip, list(prompt.ids), pool, made[0].tolist()))

        async def nothing() -> list[Any]:
            return []

        vectors = SimpleNamespace(values=made.tobytes(), width=made.shape[1])
        generation = SimpleNamespace(vectors=vectors)
        return SimpleNamespace(next_deltas=nothing, settle=nothing, generations=[generation])


class Scripted(Pipeline):
    """Has heard random words in each clip."""

    def _draw(self, prompt: Any, sampling: SamplingParams, given: Any) -> list[Any]:
        words = "".join(random.choices((" a", " weft", "-", ".", " (b)", "\u7ec7"), k=4))
        ids = [FIRST, *TOKENIZER.encode(words, add_special_tokens=False).ids]
        ids += random.choice(([FIRST + 60] * 2, [FIRST + NUM_POSITIONS]))
        return [SimpleNamespace(token_ids=ids, logprobs=[SimpleNamespace(logprob=-0.1)] * len(ids))]


class Clips:
    async def clip(self, file: Spectrogram, first: int, config: Any) -> Media:
        return file.clip(first, config.num_frames)


def hear(
    pipeline: Pipeline, folder: Path, samples: np.ndarray, **fields: Any
) -> tuple[list[Segment], Any]:
    """Segments of a file, and of the first clip what was decoded."""
    files = [json.loads((folder / name).read_text()) for name in ("config.json",)]
    generation = json.loads((folder / "generation_config.json").read_text())
    speech = load_speech(folder, files[0], generation, TOKENIZER)
    mel = log_mel(samples, 80, len(samples))
    heard = Spectrogram(mel.tobytes(), PROCESSOR, 80, len(samples))

    async def run() -> list[Segment]:
        order = SpeechOrder(
            body=SpeechBody(language="en", **fields),
            model="m",
            call=CallFacts(request_id="r"),
            translates=False,
            deadline=asyncio.get_running_loop().time() + 600,
        )
        card: Any = SimpleNamespace(speech=speech, tokenizer=TOKENIZER)
        work = Transcription(pipeline, Clips(), card, order)  # type: ignore[arg-type]
        return [one async for found in work.segments(heard) for one in found]

    return asyncio.run(run()), speech


def check_request(
    reference: Any, asked: tuple[Media, list[int], Any], never: Sequence[int]
) -> None:
    """Each token is the largest of what transformers' processors leave of the reference's logits,
    and its log-probability is theirs, except where float32 cannot tell.
    """
    media, begin, sample = asked
    tokens = sample.token_ids
    config = reference.generation_config
    config.no_timestamps_token_id, config.max_initial_timestamp_index = FIRST - 1, 50
    rules = WhisperTimeStampLogitsProcessor(config, begin_index=len(begin))
    suppressed = SuppressTokensLogitsProcessor(list(never))
    mel = torch.frombuffer(bytearray(media.data), dtype=torch.float32).view(1, 80, FRAMES)
    ids = torch.tensor([[*begin, *tokens]])
    with torch.inference_mode():
        logits = reference(input_features=mel, decoder_input_ids=ids[:, :-1]).logits[0]
    for count, row in enumerate(logits[len(begin) - 1 :]):
        before = ids[:, : len(begin) + count]
        kept = suppressed(before, row[None].clone())
        left = rules(before, kept)[0]
        shares = kept[0].log_softmax(-1)
        tie = abs(float(shares[FIRST:].logsumexp(-1) - shares[:FIRST].max()))
        if tie > TIE:
            assert float(left.max() - left[tokens[count]]) <= TIE
            wanted = float(left.log_softmax(-1)[tokens[count]])
            assert sample.logprobs[count].logprob == pytest.approx(wanted, abs=1e-3)


def segments_of(reference: Any, tokens: Sequence[int], seek: int, left: int) -> Any:
    """transformers' segments of a clip that begins at a frame, as (start, end, tokens), and the
    frames after which the next one begins.
    """
    found, offset = reference._retrieve_segment(
        seek_sequence=torch.tensor(tokens),
        seek_outputs=[None],
        time_offset=torch.tensor([seek / 100], dtype=torch.float64),
        timestamp_begin=FIRST,
        seek_num_frames=[min(left, FRAMES)],
        time_precision=0.02,
        time_precision_features=0.01,
        input_stride=2,
        prev_idx=0,
        idx=0,
        return_token_timestamps=False,
        decoder_input_ids=torch.zeros((1, 0), dtype=torch.int64),
    )
    parts = [(float(one["start"]), float(one["end"]), one["tokens"].tolist()) for one in found]
    # OpenAI's program leaves out segments without a text or a length.
    return [one for one in parts if one[1] > one[0] and min(one[2]) < END], int(offset)


@pytest.mark.parametrize("count", [2, pytest.param(12, marks=pytest.mark.full)])
def test_a_long_file_is_heard_as_by_transformers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    # Texts of a random model are improbable, and drawn tokens are no one's.
    monkeypatch.setattr(transcribe, "_TEMPERATURES", (0.0,))
    monkeypatch.setattr(transcribe, "_LEAST_LOGPROB", -1000.0)
    reference = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    extract = in_float64(WhisperFeatureExtractor(feature_size=80, chunk_length=2))
    options: dict[str, Any] = {"truncation": False, "padding": "longest", "sampling_rate": RATE}
    with LLM(folder, dtype="float32", num_pages=300) as llm:
        for _ in range(count):
            rng = np.random.default_rng(random.randrange(1 << 30))
            samples = rng.normal(0, 0.1, random.randint(3 * RATE, 6 * RATE)).astype(np.float32)
            mel = extract(samples, return_tensors="np", **options).input_features[0]
            pipeline, seek, said = Pipeline(llm), 0, list[int]()
            found, speech = hear(pipeline, folder, samples, beam_size=1)
            wanted = []
            for media, begin, sample in pipeline.asked:
                check_request(reference, (media, begin, sample), speech.never)
                part = mel[:, seek : seek + FRAMES]
                clip = np.frombuffer(media.data, "<f4").reshape(80, FRAMES)
                np.testing.assert_allclose(clip[:, : part.shape[1]], part, atol=1e-4)
                assert not clip[:, part.shape[1] :].any()
                before = [ID["<|startofprev|>"], *said[-(CONTEXT // 2 - 1) :]] if said else []
                assert begin == [*before, START, ID["<|en|>"], ID["<|transcribe|>"]]
                tokens = [one for one in sample.token_ids if one != END]
                parts, offset = segments_of(reference, tokens, seek, mel.shape[1] - seek)
                wanted += parts
                # A time that ends a text may begin the next one, which a clip's end cuts off.
                said += [one for segment in found if segment.seek == seek for one in segment.ids]
                seek += offset or min(FRAMES, mel.shape[1] - seek)
            assert seek >= mel.shape[1]
            assert len(found) == len(wanted)
            for segment, (start, end, tokens) in zip(found, wanted, strict=True):
                assert (segment.start_s, segment.end_s) == pytest.approx((start, end), abs=0.011)
                assert list(segment.ids) == tokens[: len(segment.ids)]


def test_words_have_the_times_of_their_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The times of all words of a file, from transformers' alignment of what was heard."""

    async def nobody_is_silent(*_: Any) -> float:
        return 0.0

    monkeypatch.setattr(Transcription, "_no_speech", nobody_is_silent)
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = WhisperForConditionalGeneration.from_pretrained(folder, **options).eval()
    rng = np.random.default_rng(random.randrange(1 << 30))
    samples = rng.normal(0, 0.1, random.randint(3 * RATE, 6 * RATE)).astype(np.float32)
    with LLM(folder, dtype="float32", num_pages=300) as llm:
        pipeline = Scripted(llm)
        found, _ = hear(
            pipeline,
            folder,
            samples,
            response_format="verbose_json",
            timestamp_granularities=("word",),
        )
    layers = reference.config.decoder_layers
    heads = [
        (layer, head)
        for layer in range(layers // 2, layers)
        for head in range(reference.config.decoder_attention_heads)
    ]
    for media, prompt, pool, answer in pipeline.aligned:
        num_begin = pool.aligned_from - NUM_ROWS
        asked = media.data, prompt[NUM_ROWS:], num_begin, heads, pool.num_frames
        check_times(answer, reference, *asked)
    assert len(found) == len(pipeline.aligned) >= 2
    for segment in found:
        words = segment.words
        assert "".join([word.text for word in words]) == segment.text
        clip_end = segment.seek / 100 + 2 * NUM_POSITIONS / 100
        at = [time for word in words for time in (word.start_s, word.end_s)]
        assert at == sorted(at)
        assert segment.seek / 100 <= at[0] <= at[-1] <= clip_end
