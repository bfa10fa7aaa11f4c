"""The fields of OpenAI's calls of audio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from weft.contract.request import MAX_BEAMS
from weft.gateway.api.audio.form import Form
from weft.gateway.api.openai.parse import explain
from weft.gateway.validate import invalid, unsupported

ResponseFormat = Literal["json", "text", "srt", "verbose_json", "vtt"]
_LISTS = ("timestamp_granularities", "include")
_ONLY_HERE = ("language", "timestamp_granularities", "include", "stream")
"""Fields that translations lack."""
_MAX_PROMPT_CHARS = 10_000
DEFAULT_BEAMS = 5
"""As of Whisper's own program and of faster-whisper (bench/notes/speech.md)."""


class SpeechBody(BaseModel):
    """A body of /v1/audio/transcriptions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = Field(None, description="a served model; may be absent where there is one")
    language: str | None = Field(
        None, description="code of the spoken language, such as `en`; absent = it is found"
    )
    prompt: Annotated[str, Field(max_length=_MAX_PROMPT_CHARS)] = Field(
        "", description="a text that might precede the speech: names, spelling, style"
    )
    response_format: ResponseFormat = Field("json", description="form of the answer")
    temperature: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="0 = a beam search, and samples at higher ones where the text is improbable or "
        "repeats itself",
    )
    beam_size: Annotated[int, Field(ge=1, le=MAX_BEAMS)] | None = Field(
        None,
        description="texts of each clip that are continued side by side at temperature 0, of which "
        f"the likeliest counts; 1 = greedy; absent = {DEFAULT_BEAMS}, or 1 where a worker has no "
        "room for them",
    )
    timestamp_granularities: tuple[Literal["segment", "word"], ...] = Field(
        (), description="`segment` or `word`, with `verbose_json`: whose times the answer has"
    )
    stream: bool = Field(False, description="events as parts of the file are done: json, text")
    include: tuple[str, ...] = Field((), description="not supported")

    @property
    def is_verbose(self) -> bool:
        return self.response_format == "verbose_json"

    @property
    def wants_words(self) -> bool:
        return "word" in self.timestamp_granularities

    @property
    def wants_segments(self) -> bool:
        return self.is_verbose and self.timestamp_granularities != ("word",)


def read_form(form: Form, *, translates: bool) -> tuple[SpeechBody, bytes]:
    """The fields and the file of a form. Raises InvalidRequest, whose `param` is a field's name."""
    given: dict[str, object] = {
        name: tuple(values) if name in _LISTS else values[-1] for name, values in form.texts.items()
    }
    if form.texts.get("chunking_strategy", ["auto"])[-1] == "auto":
        given.pop("chunking_strategy", None)
    if translates:
        _refuse(given, _ONLY_HERE)
    try:
        body = SpeechBody.model_validate(given)
    except ValidationError as error:
        raise explain(error.errors(include_url=False)) from None
    if body.include:
        raise unsupported("include", "log-probabilities of transcripts")
    if body.timestamp_granularities and not body.is_verbose:
        raise invalid("timestamp_granularities", "needs response_format: verbose_json")
    if body.stream and body.response_format not in ("json", "text"):
        raise invalid("stream", f"is not possible with response_format: {body.response_format}")
    file = form.files.get("file")
    if not file:
        raise invalid("file", "is missing or empty; give a file of audio")
    return body, file


def _refuse(given: Mapping[str, object], names: tuple[str, ...]) -> None:
    for name in names:
        if name in given and given[name] not in ("", "false"):
            raise unsupported(name, "of transcriptions, not of translations")
