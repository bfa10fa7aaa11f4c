"""The routes of the dialects beside OpenAI's, and what an OpenAPI document says of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from google.api import annotations_pb2
from google.protobuf.descriptor import ServiceDescriptor
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
from weft.gateway.api.trainer import bodies as trainer
from weft.gateway.api.trainer.token_answers import ContinuedAnswer, TokensAnswer
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody
from weft.v1 import dialects_pb2

_EVENTS, _LINES, _JSON = "text/event-stream", "application/x-ndjson", "application/json"
_REF = "#/components/schemas/"
_PARAMETER = re.compile(r"\{(\w+)\}")

Model = type[BaseModel]


@dataclass(frozen=True, slots=True)
class Route:
    """One rpc of a dialect, whose paths are those of the protos."""

    rpc: str
    summary: str
    answer: Model
    body: Model | None = None
    event: Model | None = None
    """Model of the messages of a streamed answer; None: it is never streamed."""
    event_kind: str = _EVENTS
    answer_kind: str = _JSON
    body_kind: str = _JSON
    has_text: bool = False
    """Whether the answer may also be plain text."""
    query: tuple[str, ...] = ()
    """Names of its query parameters, all of them texts that may be absent."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The routes of a service, which share names of schemas and the shape of failures."""

    failure: Model
    service: ServiceDescriptor
    routes: Sequence[Route]

    @property
    def schema_ref(self) -> str:
        """Reference to the schema of a `model`. Schemas of all dialects but OpenAI's have the
        dialect's name in front.
        """
        name = str(self.service.name).removesuffix("Service")
        return _REF + ("{model}" if name == "OpenAI" else f"{name}.{{model}}")

    def paths_of(self, route: Route) -> list[tuple[str, str]]:
        """Methods, such as `get`, and paths of a route."""
        rule = self.service.methods_by_name[route.rpc].GetOptions().Extensions[annotations_pb2.http]
        bindings = [(one.WhichOneof("pattern"), one) for one in (rule, *rule.additional_bindings)]
        # `=**` marks a parameter that spans several segments of a path; OpenAPI has no such mark.
        return [(method, getattr(one, method).replace("=**", "")) for method, one in bindings]


DIALECTS = (
    Dialect(
        ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["ResponsesService"],
        (
            Route(
                "CreateResponse",
                "Answers a conversation, given as items or continued.",
                responses.ResponseAnswer,
                ResponsesBody,
                responses.ResponseEvent,
            ),
            Route("RetrieveResponse", "Returns a stored response.", responses.ResponseAnswer),
            Route(
                "ListInputItems",
                "Lists the items that a stored response answered.",
                responses.ItemsAnswer,
                query=("after", "limit", "order"),
            ),
            Route(
                "CountInputTokens",
                "Counts the tokens of a conversation.",
                responses.CountAnswer,
                ResponsesBody,
            ),
            Route("DeleteResponse", "Forgets a stored response.", responses.DeletedAnswer),
            Route(
                "CancelResponse",
                "Ends a response that is being generated.",
                responses.ResponseAnswer,
            ),
        ),
    ),
    Dialect(
        anthropic.ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["AnthropicService"],
        (
            Route(
                "CreateMessage",
                "Answers a conversation, as Anthropic's API does.",
                anthropic.MessageAnswer,
                MessagesBody,
                anthropic.MessageEvent,
            ),
            Route(
                "CountTokens",
                "Counts the tokens of a conversation.",
                anthropic.CountAnswer,
                CountTokensBody,
            ),
        ),
    ),
    Dialect(
        ollama.ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["OllamaService"],
        (
            Route(
                "Chat",
                "Answers a conversation, as Ollama does.",
                ollama.ChatAnswer,
                ChatBody,
                ollama.ChatAnswer,
                _LINES,
            ),
            Route(
                "Generate",
                "Answers one prompt, or continues a text.",
                ollama.GenerateAnswer,
                GenerateBody,
                ollama.GenerateAnswer,
                _LINES,
            ),
            Route("Embed", "Turns texts into vectors.", ollama.EmbedAnswer, EmbedBody),
            Route(
                "EmbedPrompt",
                "Turns a text into a vector.",
                ollama.EmbeddingsAnswer,
                EmbedPromptBody,
            ),
            Route("ListTags", "Lists the served models.", ollama.ModelsAnswer),
            Route("ListRunning", "Lists the models that are ready.", ollama.ModelsAnswer),
            Route("ShowModel", "Describes a model.", ollama.ShowAnswer, ShowBody),
            Route("GetVersion", "This server's version.", ollama.VersionAnswer),
        ),
    ),
    Dialect(
        ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["PoolingService"],
        (
            Route(
                "CreateEmbeddings",
                "Turns texts into vectors.",
                pooling.EmbeddingsAnswer,
                EmbeddingsBody,
            ),
            Route(
                "EmbedTexts",
                "Turns texts into vectors, as Cohere's API has it.",
                pooling.CohereEmbedAnswer,
                CohereEmbedBody,
            ),
            Route(
                "RerankDocuments",
                "Orders documents by their relevance to a query.",
                pooling.RerankAnswer,
                RerankBody,
            ),
            Route("ScorePairs", "Scores pairs of texts.", pooling.ScoreAnswer, ScoreBody),
            Route(
                "ClassifyTexts", "Gives the classes of texts.", pooling.ClassifyAnswer, ClassifyBody
            ),
            Route(
                "PoolTexts",
                "Gives what the model makes of texts.",
                pooling.PoolingAnswer,
                PoolingBody,
            ),
        ),
    ),
    Dialect(
        ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["ServerService"],
        (
            Route("ShowVersion", "This server's version.", server.VersionAnswer),
            Route("Ping", "200 when requests can be served.", server.PingAnswer),
            Route(
                "HealthGenerate", "200 once every model has generated a token.", server.HealthAnswer
            ),
            Route(
                "TokenizerInfo",
                "Describes a model's tokenizer.",
                server.TokenizerAnswer,
                query=("model",),
            ),
            Route(
                "StartProfile",
                "Begins a profile of all workers, for operators.",
                server.ProfileAnswer,
                ProfileBody,
            ),
            Route(
                "StopProfile",
                "Ends the profile, for operators.",
                server.ProfileAnswer,
                StopProfileBody,
            ),
            Route(
                "StartExpertRecord",
                "Counts anew what experts tokens choose, for operators.",
                server.ExpertsAnswer,
            ),
            Route(
                "StopExpertRecord", "Counts experts no longer, for operators.", server.ExpertsAnswer
            ),
            Route(
                "DumpExpertRecord",
                "Tells what was counted of experts, for operators.",
                server.ExpertsAnswer,
            ),
            Route(
                "BalanceExperts",
                "Divides experts among ranks by what was counted, for operators.",
                server.ExpertsAnswer,
            ),
            Route(
                "Metrics",
                "The gateway's metrics, if its settings allow it.",
                server.MetricsAnswer,
                answer_kind="text/plain",
            ),
        ),
    ),
    Dialect(
        ErrorAnswer,
        dialects_pb2.DESCRIPTOR.services_by_name["TrainerService"],
        (
            Route(
                "PauseWorkers",
                "Pauses all workers, for trainers.",
                trainer.TrainerAnswer,
                query=("mode", "clear_cache"),
            ),
            Route("ResumeWorkers", "Ends a pause, for trainers.", trainer.TrainerAnswer),
            Route("IsPaused", "Tells whether a worker is paused.", trainer.PausedAnswer),
            Route(
                "PauseGeneration",
                "Pauses all workers, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.PauseGenerationBody,
            ),
            Route(
                "ContinueGeneration",
                "Ends a pause, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.ContinueGenerationBody,
            ),
            Route(
                "UpdateWeightsFromDisk",
                "Changes the weights of all workers.",
                trainer.TrainerAnswer,
                trainer.UpdateFromDiskBody,
            ),
            Route(
                "InitWeightsUpdateGroup",
                "Joins a trainer's process group, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.InitGroupBody,
            ),
            Route(
                "DestroyWeightsUpdateGroup",
                "Leaves a trainer's process group, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.DestroyGroupBody,
            ),
            Route(
                "BeginWeightUpdate",
                "Begins an update that a group brings, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.BeginUpdateBody,
            ),
            Route(
                "UpdateWeightsFromDistributed",
                "Receives tensors from a group, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.UpdateFromDistributedBody,
            ),
            Route(
                "EndWeightUpdate",
                "Ends an update, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.EndUpdateBody,
            ),
            Route(
                "UpdateWeightsFromTensor",
                "Takes tensors that a trainer on the workers' machine lends.",
                trainer.TrainerAnswer,
                trainer.UpdateFromTensorBody,
            ),
            Route(
                "UpdateWeightsFromPeer",
                "Copies the weights of one of the mesh's workers to the others of its model.",
                trainer.TrainerAnswer,
                trainer.UpdateFromPeerBody,
            ),
            Route(
                "UpdateWeightsFromIpc",
                "Refused: its handles are pickled.",
                trainer.TrainerAnswer,
                trainer.PickledBody,
            ),
            Route(
                "InitWeightTransferEngine",
                "Joins a trainer's process group, as vLLM has it.",
                trainer.TrainerAnswer,
                trainer.InitTransferBody,
            ),
            Route(
                "StartWeightUpdate",
                "Begins an update that a group brings, as vLLM has it.",
                trainer.TrainerAnswer,
                trainer.StartUpdateBody,
            ),
            Route(
                "UpdateWeights",
                "Receives tensors from the group, as vLLM has it.",
                trainer.TrainerAnswer,
                trainer.UpdateBody,
            ),
            Route(
                "FinishWeightUpdate",
                "Ends an update, as vLLM has it.",
                trainer.TrainerAnswer,
                trainer.FinishUpdateBody,
            ),
            Route(
                "ShutdownWeightTransferEngine",
                "Leaves the group, as vLLM has it.",
                trainer.TrainerAnswer,
                trainer.NoBody,
            ),
            Route(
                "AbortRequests",
                "Ends all requests of all workers, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.AbortRequestsBody,
            ),
            Route(
                "ShowLoads",
                "Counts the requests of each worker, as SGLang has it.",
                trainer.LoadsAnswer,
                query=("include",),
            ),
            Route(
                "GetWorldSize",
                "Counts the ranks of all workers, for trainers.",
                trainer.WorldSizeAnswer,
                query=("include_dp",),
            ),
            Route(
                "GetWeightVersion",
                "Names the version that all workers serve.",
                trainer.VersionAnswer,
            ),
            Route(
                "SleepWorkers",
                "All workers give memory back.",
                trainer.TrainerAnswer,
                query=("level", "mode", "tags"),
            ),
            Route("WakeWorkers", "All workers wake.", trainer.TrainerAnswer, query=("tags",)),
            Route("IsSleeping", "Tells whether a worker sleeps.", trainer.SleepingAnswer),
            Route(
                "ReleaseMemory",
                "All workers give memory back, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.MemoryBody,
            ),
            Route(
                "ResumeMemory",
                "All workers wake, as SGLang has it.",
                trainer.TrainerAnswer,
                trainer.MemoryBody,
            ),
            Route("FlushCache", "Drops cached pages.", trainer.FlushedAnswer),
            Route(
                "CheckWeights",
                "Gives digests of what the workers have in memory.",
                trainer.TrainerAnswer,
                trainer.CheckWeightsBody,
            ),
            Route(
                "GenerateTokens",
                "Continues texts or tokens, as SGLang has it.",
                TokensAnswer,
                GenerateTokensBody,
                TokensAnswer,
            ),
            Route(
                "ContinueTokens",
                "Continues tokens, as vLLM has it.",
                ContinuedAnswer,
                ContinueTokensBody,
                ContinuedAnswer,
            ),
            Route(
                "ShowServer",
                "Tells which weights each worker serves, for trainers.",
                trainer.ServerInfoAnswer,
                query=("config_format",),
            ),
        ),
    ),
)


def dialect_paths(
    dialects: Iterable[Dialect],
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The paths of dialects, and the schemas that they refer to."""
    paths: dict[str, dict[str, Any]] = {}
    schemas: dict[str, Any] = {}
    for dialect in dialects:
        modes: list[tuple[Model, JsonSchemaMode]] = [(dialect.failure, "serialization")]
        for route in dialect.routes:
            modes += [(one, "serialization") for one in (route.answer, route.event) if one]
            if route.body is not None:
                modes.append((route.body, "validation"))
            for method, path in dialect.paths_of(route):
                paths.setdefault(path, {})[method] = _operation(dialect, route, method, path)
        _, made = models_json_schema(list(dict.fromkeys(modes)), ref_template=dialect.schema_ref)
        prefix = dialect.schema_ref.format(model="").removeprefix(_REF)
        schemas |= {f"{prefix}{name}": value for name, value in made["$defs"].items()}
    return paths, schemas


def _operation(dialect: Dialect, route: Route, method: str, path: str) -> dict[str, Any]:
    def content(model: Model, kind: str = _JSON) -> dict[str, Any]:
        return {kind: {"schema": {"$ref": dialect.schema_ref.format(model=model.__name__)}}}

    answers = content(route.answer, route.answer_kind)
    if route.event is not None:
        answers |= content(route.event, route.event_kind)
    text = {"schema": {"type": "string"}}
    if route.has_text:
        answers["text/plain"] = text
    words = [word.strip("{}") for word in path.replace("/v1", "").split("/") if word]
    if (method, f"/v1{path}") in dialect.paths_of(route):
        words.insert(0, "alias")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": "_".join([method, *words]),
        "responses": {
            "200": {"description": "Success.", "content": answers},
            "default": {"description": "Failure.", "content": content(dialect.failure)},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": content(route.body, route.body_kind),
        }
    parameters = [
        {"name": name, "in": "path", "required": True, **text} for name in _PARAMETER.findall(path)
    ]
    parameters += [{"name": name, "in": "query", **text} for name in route.query]
    if parameters:
        operation["parameters"] = parameters
    return operation
