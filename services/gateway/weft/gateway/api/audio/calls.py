"""Answers OpenAI's calls of audio."""

from __future__ import annotations

import asyncio
from functools import partial

from google.api.httpbody_pb2 import HttpBody
from weft.checkpoint.audio_config import SAMPLE_RATE
from weft.common.rpc.errors import Context
from weft.common.rpc.interceptors import TakenBody
from weft.gateway.api.answer import EVENTS
from weft.gateway.api.audio.answers import (
    CONTENT_TYPES,
    delta_event,
    done_event,
    render,
    whole_text,
)
from weft.gateway.api.audio.bodies import SpeechBody, read_form
from weft.gateway.api.audio.form import parse_form
from weft.gateway.api.audio.segments import Segment
from weft.gateway.api.audio.transcribe import SpeechOrder, Transcription
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.parse import BodyParser, BodyTooLarge
from weft.gateway.api.relay import EdgeFace
from weft.gateway.catalogue import Catalogue
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.media.clips import ClipReader, Spectrogram
from weft.gateway.request import earliest
from weft.gateway.text.model_card import ModelCard
from weft.gateway.text.speech import SpeechTokens
from weft.gateway.validate import invalid


class AudioCalls:
    """Belongs to the event loop. `timeout_s` is the longest time that a file may take."""

    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        bodies: BodyParser,
        relays: EdgeFace,
        clips: ClipReader,
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        self._pipeline, self._models = pipeline, models
        self._bodies, self._relays = bodies, relays
        self._clips = clips
        self._max_bytes, self._timeout_s = max_bytes, timeout_s

    async def run(
        self, request: HttpBody | TakenBody, context: Context, *, translates: bool
    ) -> None:
        """Answers a call whose body is a form with a file."""
        call, data = call_facts(context, "transcript"), request.data
        if isinstance(request, TakenBody):
            request.remove()
        if len(data) > self._max_bytes:
            told = f"the body has {len(data)} bytes; at most {self._max_bytes} are accepted"
            raise BodyTooLarge(told, stage="validate")
        body, file = await self._bodies.run(len(data), partial(_parse, data, translates=translates))
        resolved = await self._models.find(body.model or "")
        card = await self._models.card(resolved)
        speech = _check(card, body.language, translates=translates)
        timeout_s = earliest(call.timeout_s, self._timeout_s) or self._timeout_s
        order = SpeechOrder(
            body=body,
            model=resolved.name,
            call=call,
            translates=translates,
            deadline=asyncio.get_running_loop().time() + timeout_s,
        )
        holder = call.request_id
        try:
            heard = await self._clips.decode(
                file,
                "file",
                speech.audio,
                holder=holder,
                deadline=order.deadline,
                tenant=call.tenant_name,
            )
            del file
            work = Transcription(self._pipeline, self._clips, card, order)
            if body.stream:
                await self._stream(work, heard, order, context)
            else:
                await self._collect(work, heard, order, context)
        finally:
            self._clips.held.give_back(holder)

    async def _collect(
        self, work: Transcription, heard: Spectrogram, order: SpeechOrder, context: Context
    ) -> None:
        form = order.body.response_format
        segments = [one async for found in work.segments(heard) for one in found]
        task = "translate" if order.translates else "transcribe"
        duration_s = heard.num_samples / SAMPLE_RATE
        data = render(order.body, segments, duration_s, work.language, task)
        await begin_answer(context, order.call.request_id, CONTENT_TYPES[form])
        await context.write(HttpBody(content_type=CONTENT_TYPES[form], data=data))

    async def _stream(
        self, work: Transcription, heard: Spectrogram, order: SpeechOrder, context: Context
    ) -> None:
        segments = list[Segment]()
        with self._relays.stream_of(context, EVENTS) as out:
            await begin_answer(context, order.call.request_id, EVENTS, tuple(out.headers))
            async for found in work.segments(heard):
                text = "".join([one.text for one in found])
                if text:
                    event = delta_event(text if segments else text.lstrip())
                    if not out.send(event):
                        await out.ready()
                segments += found
        last = done_event(whole_text(segments), heard.num_samples / SAMPLE_RATE)
        await context.write(HttpBody(content_type=EVENTS, data=last))


def _parse(data: bytes, *, translates: bool) -> tuple[SpeechBody, bytes]:
    return read_form(parse_form(data), translates=translates)


def _check(card: ModelCard, language: str | None, *, translates: bool) -> SpeechTokens:
    speech = card.speech
    if speech is None:
        raise invalid("model", f"the model `{card.name}` transcribes no speech")
    if translates and not speech.languages:
        raise invalid("model", f"the model `{card.name}` knows English alone")
    known = speech.languages or {"en": speech.start}
    if language is not None and language not in known:
        raise invalid("language", f"{language[:40]!r} is none of {', '.join(sorted(known))}")
    return speech
