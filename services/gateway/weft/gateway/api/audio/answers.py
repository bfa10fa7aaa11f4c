"""Transcripts in the forms that clients ask for."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field
from weft.gateway.api.answer import JSON
from weft.gateway.api.audio.bodies import SpeechBody
from weft.gateway.api.audio.segments import Segment
from weft.gateway.api.openai.chunks import to_json

CONTENT_TYPES = {
    "json": JSON,
    "verbose_json": JSON,
    "text": "text/plain; charset=utf-8",
    "srt": "application/x-subrip; charset=utf-8",
    "vtt": "text/vtt; charset=utf-8",
}


class DurationUsage(BaseModel):
    """What a transcription is charged for."""

    type: str = Field(default="duration", description="`duration`")
    seconds: float = Field(description="of the file")


class TranscriptSegment(BaseModel):
    """A part of a transcript."""

    id: int = Field(description="number from 0")
    seek: int = Field(description="start of its clip, in frames of 10 ms")
    start: float = Field(description="seconds")
    end: float = Field(description="seconds")
    text: str
    tokens: list[int]
    temperature: float = Field(description="at which its clip was drawn")
    avg_logprob: float = Field(description="of its clip's tokens")
    compression_ratio: float = Field(description="of its clip's text")
    no_speech_prob: float = Field(description="probability that nobody speaks in its clip")


class TranscriptWord(BaseModel):
    """A word of a transcript."""

    word: str
    start: float = Field(description="seconds")
    end: float = Field(description="seconds")


class TranscriptAnswer(BaseModel):
    """The answer; the last five fields with `verbose_json` alone."""

    text: str
    usage: DurationUsage
    task: str | None = Field(default=None, description="`transcribe` or `translate`")
    language: str | None = Field(default=None, description="code of the spoken language")
    duration: float | None = Field(default=None, description="seconds of the file")
    segments: list[TranscriptSegment] | None = None
    words: list[TranscriptWord] | None = None


class TranscriptEvent(BaseModel):
    """An event of a streamed transcript."""

    type: str = Field(description="`transcript.text.delta`, at the end `transcript.text.done`")
    delta: str | None = Field(default=None, description="text that follows")
    text: str | None = Field(default=None, description="the whole text, at the end")
    usage: DurationUsage | None = Field(default=None, description="at the end")


def whole_text(segments: Sequence[Segment]) -> str:
    return "".join([segment.text for segment in segments]).strip()


def delta_event(text: str) -> bytes:
    """An event with a text that follows."""
    return _event(TranscriptEvent(type="transcript.text.delta", delta=text))


def done_event(text: str, duration_s: float) -> bytes:
    """The last event."""
    usage = DurationUsage(seconds=duration_s)
    return _event(TranscriptEvent(type="transcript.text.done", text=text, usage=usage))


def render(
    body: SpeechBody, segments: Sequence[Segment], duration_s: float, language: str, task: str
) -> bytes:
    """A transcript in the form that a body asks for."""
    form = body.response_format
    if form == "srt":
        return _subtitles(segments, ",").encode()
    if form == "vtt":
        return f"WEBVTT\n\n{_subtitles(segments, '.', numbered=False)}".encode()
    text = whole_text(segments)
    if form == "text":
        return f"{text}\n".encode()
    answer = TranscriptAnswer(text=text, usage=DurationUsage(seconds=duration_s))
    if form == "verbose_json":
        answer.task, answer.language, answer.duration = task, language, duration_s
        if body.wants_segments:
            answer.segments = [_described(number, one) for number, one in enumerate(segments)]
        if body.wants_words:
            answer.words = [
                TranscriptWord(word=word.text.strip(), start=word.start_s, end=word.end_s)
                for one in segments
                for word in one.words
            ]
    return to_json(answer.model_dump(exclude_none=True))


def _described(number: int, segment: Segment) -> TranscriptSegment:
    return TranscriptSegment(
        id=number,
        seek=segment.seek,
        start=segment.start_s,
        end=segment.end_s,
        text=segment.text,
        tokens=list(segment.ids),
        temperature=segment.clip.temperature,
        avg_logprob=segment.clip.avg_logprob,
        compression_ratio=segment.clip.compression_ratio,
        no_speech_prob=segment.clip.no_speech or 0.0,
    )


def _subtitles(segments: Sequence[Segment], mark: str, *, numbered: bool = True) -> str:
    blocks = []
    for number, one in enumerate(segments, 1):
        times = f"{_time(one.start_s, mark)} --> {_time(one.end_s, mark)}"
        # An arrow in a text would look like times.
        text = one.text.strip().replace("-->", "->")
        blocks.append(f"{number}\n{times}\n{text}\n" if numbered else f"{times}\n{text}\n")
    return "\n".join(blocks)


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{mark}{rest % 1000:03}"


def _event(event: TranscriptEvent) -> bytes:
    return b"data: " + to_json(event.model_dump(exclude_none=True)) + b"\n\n"
