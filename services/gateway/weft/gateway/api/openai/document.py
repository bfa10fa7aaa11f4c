"""The OpenAPI document, generated from the models that validate bodies and describe answers."""

from __future__ import annotations

from functools import partial
from typing import Any

from weft.contract.version import version
from weft.gateway.api.audio.answers import TranscriptAnswer, TranscriptEvent
from weft.gateway.api.audio.bodies import SpeechBody
from weft.gateway.api.document import DIALECTS, Dialect, Route, dialect_paths
from weft.gateway.api.openai import adapters, answers, bodies
from weft.gateway.api.openai.bounds import state_bounds
from weft.v1 import openai_pb2

_FILE = {"type": "string", "format": "binary", "description": "WAV, FLAC, OGG or MP3"}
_SpeechRoute = partial(
    Route,
    answer=TranscriptAnswer,
    body=SpeechBody,
    event=TranscriptEvent,
    body_kind="multipart/form-data",
    has_text=True,
)
_OPENAI = Dialect(
    answers.ErrorAnswer,
    openai_pb2.DESCRIPTOR.services_by_name["OpenAIService"],
    (
        Route(
            "ChatCompletions",
            "Answers a conversation.",
            answers.ChatAnswer,
            bodies.ChatBody,
            answers.ChatChunk,
        ),
        Route(
            "Completions",
            "Continues one text or several.",
            answers.CompletionAnswer,
            bodies.CompletionBody,
            answers.CompletionAnswer,
        ),
        Route(
            "CountChatTokens",
            "Counts the tokens of a conversation.",
            answers.CountAnswer,
            bodies.ChatBody,
        ),
        Route("TokenizeText", "Text to token ids.", answers.TokenizeAnswer, bodies.TokenizeBody),
        Route(
            "LoadLoraAdapter",
            "Loads a LoRA adapter on all workers.",
            adapters.AdapterAnswer,
            adapters.LoadAdapterBody,
        ),
        Route(
            "UnloadLoraAdapter",
            "Takes a LoRA adapter away.",
            adapters.AdapterAnswer,
            adapters.UnloadAdapterBody,
        ),
        Route(
            "EndSession",
            "Ends a chat: no worker keeps anything for it any more.",
            answers.EndSessionAnswer,
            bodies.EndSessionBody,
        ),
        Route(
            "DetokenizeTokens",
            "Token ids to text.",
            answers.DetokenizeAnswer,
            bodies.DetokenizeBody,
        ),
        _SpeechRoute("Transcriptions", "Transcribes a file of speech."),
        _SpeechRoute("Translations", "Transcribes a file of speech into English."),
        Route("Models", "Lists the served models.", answers.ModelListAnswer),
        Route("RetrieveModel", "Describes a served model.", answers.ModelAnswer),
        Route("Ready", "200 when requests can be served.", answers.ReadyAnswer),
        Route(
            "CancelRequestById",
            "Ends a request of the caller that waits or runs.",
            answers.CancelAnswer,
        ),
    ),
)


def openapi_document() -> dict[str, Any]:
    """Builds the OpenAPI 3.1 document of the REST face."""
    paths, schemas = dialect_paths((_OPENAI, *DIALECTS))
    form = schemas["SpeechBody"]
    form["properties"]["file"], form["required"] = _FILE, ["file"]
    state_bounds(schemas, adapters.BOUNDS)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": version()},
        "paths": paths,
        "components": {"schemas": schemas},
    }
