"""The OpenAPI document, generated from the models that validate bodies and describe answers."""

from __future__ import annotations

import re
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from weft.contract.version import version
from weft.gateway.api.audio.answers import TranscriptAnswer, TranscriptEvent
from weft.gateway.api.audio.bodies import SpeechBody
from weft.gateway.api.document import dialect_paths
from weft.gateway.api.openai import adapters, answers, bodies
from weft.gateway.api.openai.bounds import state_bounds

_PARAMETER = re.compile(r"\{(\w+)\}")
_REF = "#/components/schemas/{model}"

_POSTS: dict[str, tuple[str, type[BaseModel], type[BaseModel], type[BaseModel] | None]] = {
    "/v1/chat/completions": (
        "Answers a conversation.",
        bodies.ChatBody,
        answers.ChatAnswer,
        answers.ChatChunk,
    ),
    "/v1/completions": (
        "Continues one text or several.",
        bodies.CompletionBody,
        answers.CompletionAnswer,
        answers.CompletionAnswer,
    ),
    "/v1/chat/completions/input_tokens": (
        "Counts the tokens of a conversation.",
        bodies.ChatBody,
        answers.CountAnswer,
        None,
    ),
    "/tokenize": ("Text to token ids.", bodies.TokenizeBody, answers.TokenizeAnswer, None),
    **adapters.POSTS,
    "/v1/end_session": (
        "Ends a chat: no worker keeps anything for it any more.",
        bodies.EndSessionBody,
        answers.EndSessionAnswer,
        None,
    ),
    "/detokenize": ("Token ids to text.", bodies.DetokenizeBody, answers.DetokenizeAnswer, None),
}
_FORMS: dict[str, str] = {
    "/v1/audio/transcriptions": "Transcribes a file of speech.",
    "/v1/audio/translations": "Transcribes a file of speech into English.",
}
"""Calls whose body is a form with a file."""
_FILE = {"type": "string", "format": "binary", "description": "WAV, FLAC, OGG or MP3"}
_BARE_POSTS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/requests/{request_id}/cancel": (
        "Ends a request of the caller that waits or runs.",
        answers.CancelAnswer,
    ),
}
"""Calls without a body."""
_GETS: dict[str, tuple[str, type[BaseModel]]] = {
    "/v1/models": ("Lists the served models.", answers.ModelListAnswer),
    "/v1/models/{model}": ("Describes a served model.", answers.ModelAnswer),
    "/readyz": ("200 when requests can be served.", answers.ReadyAnswer),
}


def openapi_document() -> dict[str, Any]:
    """Builds the OpenAPI 3.1 document of the REST face."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [(answers.ErrorAnswer, "serialization")]
    paths: dict[str, dict[str, Any]] = {}
    for path, (summary, body, answer, event) in _POSTS.items():
        modes += [(body, "validation"), (answer, "serialization")]
        content = {"application/json": {"schema": _ref(answer)}}
        if event is not None:
            modes.append((event, "serialization"))
            content["text/event-stream"] = {"schema": _ref(event)}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": _operation("post", path),
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref(body)}},
                },
                "responses": _responses(content),
            }
        }
    for path, summary in _FORMS.items():
        answered = {
            "application/json": {"schema": _ref(TranscriptAnswer)},
            "text/event-stream": {"schema": _ref(TranscriptEvent)},
            "text/plain": {"schema": {"type": "string"}},
        }
        given = {"multipart/form-data": {"schema": _ref(SpeechBody)}}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": _operation("post", path),
                "requestBody": {"required": True, "content": given},
                "responses": _responses(answered),
            }
        }
    modes += [(SpeechBody, "validation")]
    modes += [(one, "serialization") for one in (TranscriptAnswer, TranscriptEvent)]
    bare = [("get", *one) for one in _GETS.items()] + [
        ("post", *one) for one in _BARE_POSTS.items()
    ]
    for method, path, (summary, answer) in bare:
        modes.append((answer, "serialization"))
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": _operation(method, path),
            "responses": _responses({"application/json": {"schema": _ref(answer)}}),
        }
        names = _PARAMETER.findall(path)
        if names:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ]
        paths[path] = {method: operation}
    _, schemas = models_json_schema(modes, ref_template=_REF)
    form = schemas["$defs"]["SpeechBody"]
    form["properties"]["file"], form["required"] = _FILE, ["file"]
    state_bounds(schemas["$defs"], adapters.BOUNDS)
    more_paths, more_schemas = dialect_paths()
    return {
        "openapi": "3.1.0",
        "info": {"title": "Weft", "version": version()},
        "paths": paths | more_paths,
        "components": {"schemas": schemas["$defs"] | more_schemas},
    }


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _operation(method: str, path: str) -> str:
    words = [word.strip("{}") for word in path.replace("/v1", "").split("/") if word]
    return "_".join([method, *words])


def _responses(content: dict[str, Any]) -> dict[str, Any]:
    failure = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
    return {
        "200": {"description": "Success.", "content": content},
        "default": {"description": "Failure.", "content": failure},
    }
