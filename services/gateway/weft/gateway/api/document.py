"""The part of the OpenAPI document that describes the dialects."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from weft.gateway.api.anthropic import answers as anthropic
from weft.gateway.api.anthropic.bodies import CountTokensBody, MessagesBody
from weft.gateway.api.ollama import answers as ollama
from weft.gateway.api.ollama.bodies import (
    ChatBody,
    EmbedBody,
    EmbedPromptBody,
    GenerateBody,
    ShowBody,
)
from weft.gateway.api.openai.answers import ErrorAnswer
from weft.gateway.api.pooling import answers as pooling
from weft.gateway.api.pooling.bodies import (
    ClassifyBody,
    CohereEmbedBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from weft.gateway.api.responses import answers as responses
from weft.gateway.api.responses.bodies import ResponsesBody
from weft.gateway.api.server import answers as server
from weft.gateway.api.server.profiles import ProfileBody, StopProfileBody
from weft.gateway.api.trainer.bodies import (
    AbortRequestsBody,
    BeginUpdateBody,
    CheckWeightsBody,
    ContinueGenerationBody,
    DestroyGroupBody,
    EndUpdateBody,
    FinishUpdateBody,
    FlushedAnswer,
    InitGroupBody,
    InitTransferBody,
    LoadsAnswer,
    MemoryBody,
    NoBody,
    PausedAnswer,
    PauseGenerationBody,
    PickledBody,
    ServerInfoAnswer,
    SleepingAnswer,
    StartUpdateBody,
    TrainerAnswer,
    UpdateBody,
    UpdateFromDiskBody,
    UpdateFromDistributedBody,
    UpdateFromPeerBody,
    UpdateFromTensorBody,
    VersionAnswer,
    WorldSizeAnswer,
)
from weft.gateway.api.trainer.token_answers import ContinuedAnswer, TokensAnswer
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody

_EVENTS, _LINES, _JSON = "text/event-stream", "application/x-ndjson", "application/json"
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"\{(\w+)\}")

Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Route:
    """One method of one path."""

    method: str
    path: str
    summary: str
    answer: Model
    body: Model | None = None
    event: Model | None = None
    """Model of the messages of a streamed answer; None: it is never streamed."""
    event_kind: str = _EVENTS
    answer_kind: str = _JSON
    is_alias: bool = False
    """Whether the path also exists with the API's version in front."""
    query: tuple[str, ...] = ()
    """Names of its query parameters, all of them texts that may be absent."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The routes that share names of schemas and the shape of failures."""

    name: str
    failure: Model
    routes: Sequence[Route]


_RESPONSE = "/v1/responses/{response_id}"
_DIALECTS = (
    Dialect(
        "Responses",
        ErrorAnswer,
        (
            Route(
                "post",
                "/v1/responses",
                "Answers a conversation, given as items or continued.",
                responses.ResponseAnswer,
                ResponsesBody,
                responses.ResponseEvent,
            ),
            Route("get", _RESPONSE, "Returns a stored response.", responses.ResponseAnswer),
            Route(
                "get",
                f"{_RESPONSE}/input_items",
                "Lists the items that a stored response answered.",
                responses.ItemsAnswer,
                query=("after", "limit", "order"),
            ),
            Route(
                "post",
                "/v1/responses/input_tokens",
                "Counts the tokens of a conversation.",
                responses.CountAnswer,
                ResponsesBody,
            ),
            Route("delete", _RESPONSE, "Forgets a stored response.", responses.DeletedAnswer),
            Route(
                "post",
                f"{_RESPONSE}/cancel",
                "Ends a response that is being generated.",
                responses.ResponseAnswer,
            ),
        ),
    ),
    Dialect(
        "Anthropic",
        anthropic.ErrorAnswer,
        (
            Route(
                "post",
                "/v1/messages",
                "Answers a conversation, as Anthropic's API does.",
                anthropic.MessageAnswer,
                MessagesBody,
                anthropic.MessageEvent,
            ),
            Route(
                "post",
                "/v1/messages/count_tokens",
                "Counts the tokens of a conversation.",
                anthropic.CountAnswer,
                CountTokensBody,
            ),
        ),
    ),
    Dialect(
        "Ollama",
        ollama.ErrorAnswer,
        (
            Route(
                "post",
                "/api/chat",
                "Answers a conversation, as Ollama does.",
                ollama.ChatAnswer,
                ChatBody,
                ollama.ChatAnswer,
                _LINES,
            ),
            Route(
                "post",
                "/api/generate",
                "Answers one prompt, or continues a text.",
                ollama.GenerateAnswer,
                GenerateBody,
                ollama.GenerateAnswer,
                _LINES,
            ),
            Route("post", "/api/embed", "Turns texts into vectors.", ollama.EmbedAnswer, EmbedBody),
            Route(
                "post",
                "/api/embeddings",
                "Turns a text into a vector.",
                ollama.EmbeddingsAnswer,
                EmbedPromptBody,
            ),
            Route("get", "/api/tags", "Lists the served models.", ollama.ModelsAnswer),
            Route("get", "/api/ps", "Lists the models that are ready.", ollama.ModelsAnswer),
            Route("post", "/api/show", "Describes a model.", ollama.ShowAnswer, ShowBody),
            Route("get", "/api/version", "This server's version.", ollama.VersionAnswer),
        ),
    ),
    Dialect(
        "Pooling",
        ErrorAnswer,
        (
            Route(
                "post",
                "/v1/embeddings",
                "Turns texts into vectors.",
                pooling.EmbeddingsAnswer,
                EmbeddingsBody,
            ),
            Route(
                "post",
                "/v2/embed",
                "Turns texts into vectors, as Cohere's API has it.",
                pooling.CohereEmbedAnswer,
                CohereEmbedBody,
            ),
            *(
                Route(
                    "post",
                    path,
                    "Orders documents by their relevance to a query.",
                    pooling.RerankAnswer,
                    RerankBody,
                    is_alias=path == "/rerank",
                )
                for path in ("/v1/rerank", "/rerank", "/v2/rerank")
            ),
            *(
                Route(
                    "post",
                    path,
                    "Scores pairs of texts.",
                    pooling.ScoreAnswer,
                    ScoreBody,
                    is_alias=path == "/score",
                )
                for path in ("/v1/score", "/score")
            ),
            *(
                Route(
                    "post",
                    path,
                    "Gives the classes of texts.",
                    pooling.ClassifyAnswer,
                    ClassifyBody,
                    is_alias=path == "/classify",
                )
                for path in ("/v1/classify", "/classify")
            ),
            Route(
                "post",
                "/pooling",
                "Gives what the model makes of texts.",
                pooling.PoolingAnswer,
                PoolingBody,
            ),
        ),
    ),
    Dialect(
        "Server",
        ErrorAnswer,
        (
            Route("get", "/version", "This server's version.", server.VersionAnswer),
            Route("get", "/ping", "200 when requests can be served.", server.PingAnswer),
            Route("post", "/ping", "200 when requests can be served.", server.PingAnswer),
            Route(
                "get",
                "/health_generate",
                "200 once every model has generated a token.",
                server.HealthAnswer,
            ),
            Route(
                "get",
                "/tokenizer_info",
                "Describes a model's tokenizer.",
                server.TokenizerAnswer,
                query=("model",),
            ),
            Route(
                "post",
                "/start_profile",
                "Begins a profile of all workers, for operators.",
                server.ProfileAnswer,
                ProfileBody,
            ),
            Route(
                "post",
                "/stop_profile",
                "Ends the profile, for operators.",
                server.ProfileAnswer,
                StopProfileBody,
            ),
            *(
                Route(method, f"/{action}_expert_distribution_record", text, server.ExpertsAnswer)
                for action, text in (
                    ("start", "Counts anew what experts tokens choose, for operators."),
                    ("stop", "Counts experts no longer, for operators."),
                    ("dump", "Tells what was counted of experts, for operators."),
                )
                for method in ("get", "post")
            ),
            Route(
                "post",
                "/balance_experts",
                "Divides experts among ranks by what was counted, for operators.",
                server.ExpertsAnswer,
            ),
            Route(
                "get",
                "/metrics",
                "The gateway's metrics, if its settings allow it.",
                server.MetricsAnswer,
                answer_kind="text/plain",
            ),
        ),
    ),
    Dialect(
        "Trainer",
        ErrorAnswer,
        (
            Route(
                "post",
                "/pause",
                "Pauses all workers, for trainers.",
                TrainerAnswer,
                query=("mode", "clear_cache"),
            ),
            Route("post", "/resume", "Ends a pause, for trainers.", TrainerAnswer),
            Route("get", "/is_paused", "Tells whether a worker is paused.", PausedAnswer),
            Route(
                "post",
                "/pause_generation",
                "Pauses all workers, as SGLang has it.",
                TrainerAnswer,
                PauseGenerationBody,
            ),
            Route(
                "post",
                "/continue_generation",
                "Ends a pause, as SGLang has it.",
                TrainerAnswer,
                ContinueGenerationBody,
            ),
            Route(
                "post",
                "/update_weights_from_disk",
                "Changes the weights of all workers.",
                TrainerAnswer,
                UpdateFromDiskBody,
            ),
            Route(
                "post",
                "/init_weights_update_group",
                "Joins a trainer's process group, as SGLang has it.",
                TrainerAnswer,
                InitGroupBody,
            ),
            Route(
                "post",
                "/destroy_weights_update_group",
                "Leaves a trainer's process group, as SGLang has it.",
                TrainerAnswer,
                DestroyGroupBody,
            ),
            Route(
                "post",
                "/begin_weight_update",
                "Begins an update that a group brings, as SGLang has it.",
                TrainerAnswer,
                BeginUpdateBody,
            ),
            Route(
                "post",
                "/update_weights_from_distributed",
                "Receives tensors from a group, as SGLang has it.",
                TrainerAnswer,
                UpdateFromDistributedBody,
            ),
            Route(
                "post",
                "/end_weight_update",
                "Ends an update, as SGLang has it.",
                TrainerAnswer,
                EndUpdateBody,
            ),
            Route(
                "post",
                "/update_weights_from_tensor",
                "Takes tensors that a trainer on the workers' machine lends.",
                TrainerAnswer,
                UpdateFromTensorBody,
            ),
            Route(
                "post",
                "/update_weights_from_peer",
                "Copies the weights of one of the mesh's workers to the others of its model.",
                TrainerAnswer,
                UpdateFromPeerBody,
            ),
            Route(
                "post",
                "/update_weights_from_ipc",
                "Refused: its handles are pickled.",
                TrainerAnswer,
                PickledBody,
            ),
            Route(
                "post",
                "/init_weight_transfer_engine",
                "Joins a trainer's process group, as vLLM has it.",
                TrainerAnswer,
                InitTransferBody,
            ),
            Route(
                "post",
                "/start_weight_update",
                "Begins an update that a group brings, as vLLM has it.",
                TrainerAnswer,
                StartUpdateBody,
            ),
            Route(
                "post",
                "/update_weights",
                "Receives tensors from the group, as vLLM has it.",
                TrainerAnswer,
                UpdateBody,
            ),
            Route(
                "post",
                "/finish_weight_update",
                "Ends an update, as vLLM has it.",
                TrainerAnswer,
                FinishUpdateBody,
            ),
            Route(
                "post",
                "/shutdown_weight_transfer_engine",
                "Leaves the group, as vLLM has it.",
                TrainerAnswer,
                NoBody,
            ),
            Route(
                "post",
                "/abort_request",
                "Ends all requests of all workers, as SGLang has it.",
                TrainerAnswer,
                AbortRequestsBody,
            ),
            Route(
                "get",
                "/v1/loads",
                "Counts the requests of each worker, as SGLang has it.",
                LoadsAnswer,
                query=("include",),
            ),
            Route(
                "get",
                "/get_world_size",
                "Counts the ranks of all workers, for trainers.",
                WorldSizeAnswer,
                query=("include_dp",),
            ),
            Route(
                "get",
                "/get_weight_version",
                "Names the version that all workers serve.",
                VersionAnswer,
            ),
            Route(
                "post",
                "/sleep",
                "All workers give memory back.",
                TrainerAnswer,
                query=("level", "mode", "tags"),
            ),
            Route("post", "/wake_up", "All workers wake.", TrainerAnswer, query=("tags",)),
            Route("get", "/is_sleeping", "Tells whether a worker sleeps.", SleepingAnswer),
            Route(
                "post",
                "/release_memory_occupation",
                "All workers give memory back, as SGLang has it.",
                TrainerAnswer,
                MemoryBody,
            ),
            Route(
                "post",
                "/resume_memory_occupation",
                "All workers wake, as SGLang has it.",
                TrainerAnswer,
                MemoryBody,
            ),
            Route("post", "/flush_cache", "Drops cached pages.", FlushedAnswer),
            Route("get", "/flush_cache", "Drops cached pages.", FlushedAnswer),
            Route("post", "/reset_prefix_cache", "Drops cached pages.", FlushedAnswer),
            Route(
                "post",
                "/weights_checker",
                "Gives digests of what the workers have in memory.",
                TrainerAnswer,
                CheckWeightsBody,
            ),
            Route(
                "post",
                "/generate",
                "Continues texts or tokens, as SGLang has it.",
                TokensAnswer,
                GenerateTokensBody,
                TokensAnswer,
            ),
            Route(
                "post",
                "/inference/v1/generate",
                "Continues tokens, as vLLM has it.",
                ContinuedAnswer,
                ContinueTokensBody,
                ContinuedAnswer,
            ),
            Route(
                "get",
                "/server_info",
                "Tells which weights each worker serves, for trainers.",
                ServerInfoAnswer,
                query=("config_format",),
            ),
        ),
    ),
)


def dialect_paths() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The paths of all dialects, and the schemas that they refer to."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for dialect in _DIALECTS:
        modes: list[tuple[Model, JsonSchemaMode]] = [(dialect.failure, "serialization")]
        for route in dialect.routes:
            modes += [(one, "serialization") for one in (route.answer, route.event) if one]
            if route.body is not None:
                modes.append((route.body, "validation"))
            paths.setdefault(route.path, {})[route.method] = _operation(dialect, route)
        template = _REF.format(name=f"{dialect.name}.{{model}}")
        _, made = models_json_schema(list(dict.fromkeys(modes)), ref_template=template)
        schemas |= {f"{dialect.name}.{name}": value for name, value in made["$defs"].items()}
    return paths, schemas


def _operation(dialect: Dialect, route: Route) -> dict[str, Any]:
    def content(model: Model, kind: str = _JSON) -> dict[str, Any]:
        return {kind: {"schema": {"$ref": _REF.format(name=f"{dialect.name}.{model.__name__}")}}}

    answers = content(route.answer, route.answer_kind)
    if route.event is not None:
        answers |= content(route.event, route.event_kind)
    words = [word.strip("{}") for word in route.path.replace("/v1", "").split("/") if word]
    if route.is_alias:
        words.insert(0, "alias")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": "_".join([route.method, *words]),
        "responses": {
            "200": {"description": "Success.", "content": answers},
            "default": {"description": "Failure.", "content": content(dialect.failure)},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": content(route.body)}
    text = {"schema": {"type": "string"}}
    parameters = [
        {"name": name, "in": "path", "required": True, **text}
        for name in _PARAMETER.findall(route.path)
    ]
    parameters += [{"name": name, "in": "query", **text} for name in route.query]
    if parameters:
        operation["parameters"] = parameters
    return operation
