"""Transcribes a file, clip after clip: each is a request of its own to the model.

A clip begins where the last complete segment of the one before has ended. Its text is the likeliest
that a beam search finds. If that is improbable or repeats itself, samples are drawn at higher
temperatures (arXiv 2212.04356, section 4.5).
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.contract.errors import DeadlineExceeded, InvalidRequest
from weft.contract.request import MAX_BIAS, BeamParams, TimeTokens
from weft.contract.spans import Media
from weft.gateway.api.audio.bodies import DEFAULT_BEAMS, SpeechBody
from weft.gateway.api.audio.segments import (
    FRAME_S,
    FRAMES_PER_TIME,
    Decoded,
    Piece,
    Segment,
    divide,
)
from weft.gateway.api.audio.words import Word, split_words
from weft.gateway.api.pooling.vectors import vectors_of
from weft.gateway.generation.answer import Delta
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.media.clips import ClipReader, Spectrogram
from weft.gateway.request import CallFacts, ClipPrompt, PoolingOptions, RawRequest
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.speech import SpeechTokens

_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_NUM_SAMPLES = 5
"""Above temperature 0: the most probable text counts that does not repeat itself."""
_MOST_COMPRESSION = 2.4
_LEAST_LOGPROB = -1.0
_MOST_NO_SPEECH = 0.6
_FORGETS_FROM = 0.5
"""Temperature above which the next clip is not told what was said."""
_NUM_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechOrder:
    """What a client wants of a file."""

    body: SpeechBody
    model: str
    call: CallFacts
    translates: bool
    deadline: float
    """When all must be done, in the event loop's time."""


class Transcription:
    """One file under way."""

    def __init__(
        self, pipeline: RequestPipeline, clips: ClipReader, card: ModelCard, order: SpeechOrder
    ) -> None:
        assert card.speech is not None, "only called for models that transcribe"
        self._pipeline, self._clips, self._card, self._order = pipeline, clips, card, order
        self._speech: SpeechTokens = card.speech
        self._numbers = itertools.count()
        width = order.body.beam_size
        self._width = DEFAULT_BEAMS if width is None else width
        self.language = order.body.language or ("" if self._speech.languages else "en")
        """Code of the spoken language; empty until it is found."""

    async def segments(self, heard: Spectrogram) -> AsyncIterator[list[Segment]]:
        """Yields the segments of each clip. Raises what a request raises."""
        speech, num_frames = self._speech, heard.num_frames
        said, seek = self._begin(), 0
        while seek < num_frames:
            length = min(speech.audio.num_frames, num_frames - seek)
            clip = await self._clips.clip(heard, seek, speech.audio)
            if not self.language:
                self.language = await self._find_language(clip)
            decoded = await self._decode(clip, said)
            if _is_silence(decoded):
                seek += length
                continue
            pieces, done = divide(decoded.ids, speech.first_time, length)
            times = await self._times(clip, said, decoded, length)
            found = [
                Segment(
                    start_s=round((seek + piece.start) * FRAME_S, 2),
                    end_s=round((seek + piece.end) * FRAME_S, 2),
                    text=text,
                    ids=piece.ids,
                    seek=seek,
                    clip=decoded,
                    words=self._words(piece, times, seek),
                )
                for piece in pieces
                if piece.end > piece.start and (text := self._text(piece.ids)).strip()
            ]
            said = [*said, *(one for segment in found for one in segment.ids)]
            said = [] if decoded.temperature > _FORGETS_FROM else said
            yield found
            seek += done

    async def _times(
        self, clip: Media, said: Sequence[int], decoded: Decoded, num_frames: int
    ) -> list[int]:
        """For each token of a text the frame at which the next one is spoken; empty: they are not
        wanted. The model reads the text once more for it.
        """
        if not self._order.body.wants_words or not decoded.ids:
            return []
        before = self._prompt(said)
        wanted = PoolingOptions(
            output="alignment",
            aligned_from=self._speech.audio.num_rows + len(before),
            num_frames=max(1, num_frames // FRAMES_PER_TIME),
        )
        raw = self._request(clip, [*before, *decoded.ids], {}, pooling=wanted)
        async with self._pipeline.open(raw) as answer:
            while await answer.next_deltas():
                pass
            await answer.settle()
            (generation,) = answer.generations
            return [FRAMES_PER_TIME * int(frame) for frame in vectors_of(generation)[0]]

    def _words(self, piece: Piece, times: Sequence[int], seek: int) -> tuple[Word, ...]:
        if not times:
            return ()
        texts = [
            (number, one)
            for number, one in enumerate(piece.ids, piece.first)
            if one < self._speech.end
        ]
        at = [round((seek + frame) * FRAME_S, 2) for frame in (0, *times)]
        spoken = [(at[number], at[number + 1]) for number, _ in texts]
        ids = [one for _, one in texts]
        return tuple(split_words(ids, spoken, self._text, self.language))

    def _begin(self) -> list[int]:
        text = self._order.body.prompt.strip()
        if not text:
            return []
        ids: list[int] = self._card.tokenizer.encode(f" {text}", add_special_tokens=False).ids
        return ids

    async def _decode(self, clip: Media, said: Sequence[int]) -> Decoded:
        body = self._order.body
        temperatures = (body.temperature,) if body.temperature else _TEMPERATURES
        tried = list[Decoded]()
        for temperature in temperatures:
            decoded = await self._draw(clip, said, temperature)
            is_improbable = decoded.avg_logprob < _LEAST_LOGPROB
            if is_improbable or (body.is_verbose and decoded.no_speech is None):
                decoded = replace(decoded, no_speech=await self._no_speech(clip, said))
            if _is_silence(decoded):
                return decoded
            if not (is_improbable or _repeats(decoded)):
                return decoded
            tried.append(decoded)
        best = max(_without_repeats(tried), key=lambda one: one.avg_logprob)
        # The next clip is told nothing of a text that is as doubtful as this one.
        return replace(best, temperature=temperatures[-1])

    async def _draw(self, clip: Media, said: Sequence[int], temperature: float) -> Decoded:
        speech, before = self._speech, self._prompt(said)
        most = min(speech.max_tokens // 2, speech.max_tokens - len(before))
        given = {
            "temperature": temperature,
            "max_tokens": most,
            "n": _NUM_SAMPLES if temperature else 1,
            "top_logprobs": 0,
            "logit_bias": dict.fromkeys(speech.never, -MAX_BIAS),
        }
        times = TimeTokens(first=speech.first_time, end=speech.end, max_initial=speech.max_initial)
        samples = None
        if self._width > 1 and not temperature:
            try:
                beams = BeamParams(width=self._width)
                samples = await self._run(clip, before, given, times, beams)
            except InvalidRequest as error:
                if error.param != "beams" or self._order.body.beam_size is not None:
                    raise
                self._width = 1  # The worker has no room for so many, and nobody asked for them.
        if samples is None:
            samples = await self._run(clip, before, given, times)
        made = [self._decoded(deltas, temperature) for deltas in samples]
        probable = [one for one in made if one.avg_logprob >= _LEAST_LOGPROB]
        # By the mean, texts that go round in circles would win: each round is likelier than the
        # one before.
        return max(_without_repeats(probable or made), key=lambda one: one.logprob)

    def _prompt(self, said: Sequence[int]) -> list[int]:
        """The tokens between a clip and its text."""
        speech = self._speech
        begin = [speech.start]
        if speech.languages:
            task = speech.translate if self._order.translates else speech.transcribe
            begin += [speech.languages[self.language], task]
        return [*self._before(said), *begin]

    def _before(self, said: Sequence[int]) -> list[int]:
        room = self._speech.max_tokens // 2 - 1
        return [self._speech.previous, *said[-room:]] if said else []

    def _decoded(self, deltas: Sequence[Delta], temperature: float) -> Decoded:
        ids = [one for delta in deltas for one in delta.ids]
        logprobs = [entry.logprob for delta in deltas for entry in delta.logprobs]
        if ids and ids[-1] == self._speech.end:
            ids.pop()
        mean = sum(logprobs) / (len(ids) + 1)
        text = self._text(ids).strip()
        return Decoded(ids=tuple(ids), text=text, temperature=temperature, avg_logprob=mean)

    async def _no_speech(self, clip: Media, said: Sequence[int]) -> float:
        shares = await self._first_token(clip, self._before(said))
        return shares.get(self._speech.no_speech, 0.0)

    async def _find_language(self, clip: Media) -> str:
        shares, languages = await self._first_token(clip, ()), self._speech.languages
        best = max(languages, key=lambda code: shares.get(languages[code], 0.0))
        return best if shares.get(languages[best]) else "en"

    async def _first_token(self, clip: Media, before: Sequence[int]) -> Mapping[int, float]:
        """Probabilities of the likeliest tokens after `before` and the start."""
        given = {"temperature": 0.0, "max_tokens": 1, "top_logprobs": _NUM_LISTED}
        ((delta, *_),) = await self._run(clip, [*before, self._speech.start], given)
        return {
            one.token_id: math.exp(one.logprob) for entry in delta.logprobs for one in entry.top
        }

    async def _run(
        self,
        clip: Media,
        begin: Sequence[int],
        given: Mapping[str, Any],
        times: TimeTokens | None = None,
        beams: BeamParams | None = None,
    ) -> list[list[Delta]]:
        """The deltas of each sample."""
        samples: dict[int, list[Delta]] = {}
        async with self._pipeline.open(self._request(clip, begin, given, times, beams)) as answer:
            while deltas := await answer.next_deltas():
                for delta in deltas:
                    samples.setdefault(delta.sample, []).append(delta)
        return [samples[number] for number in sorted(samples)]

    def _request(
        self,
        clip: Media,
        begin: Sequence[int],
        given: Mapping[str, Any],
        times: TimeTokens | None = None,
        beams: BeamParams | None = None,
        pooling: PoolingOptions | None = None,
    ) -> RawRequest:
        order, num_rows = self._order, self._speech.audio.num_rows
        left_s = order.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("the deadline passed between two clips", stage="decode")
        name = f"{order.call.request_id}-{next(self._numbers)}"
        ids = (*[self._speech.end] * num_rows, *begin)
        return RawRequest(
            call=replace(order.call, request_id=name, timeout_s=left_s),
            model=order.model,
            prompts=(ClipPrompt(ids=ids, clip=clip, num_rows=num_rows),),
            # One seed, so that a file has one text.
            given={**given, "seed": 0, "speculates": False},
            time_tokens=times,
            beams=beams,
            pooling=pooling,
        )

    def _text(self, ids: Sequence[int]) -> str:
        words = [one for one in ids if one < self._speech.end]
        text: str = self._card.tokenizer.decode(words)
        return text


def _repeats(decoded: Decoded) -> bool:
    return decoded.compression_ratio > _MOST_COMPRESSION


def _without_repeats(made: Sequence[Decoded]) -> Sequence[Decoded]:
    return [one for one in made if not _repeats(one)] or made


def _is_silence(decoded: Decoded) -> bool:
    return (
        decoded.no_speech is not None
        and decoded.no_speech > _MOST_NO_SPEECH
        and decoded.avg_logprob < _LEAST_LOGPROB
    )
