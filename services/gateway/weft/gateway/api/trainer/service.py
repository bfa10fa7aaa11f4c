"""What trainers ask for, in the forms of vLLM and of SGLang: weft.v1.TrainerService."""

from __future__ import annotations

from collections.abc import Mapping

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.version import version
from weft.contract.errors import WeftError
from weft.contract.weights import PauseMode, WeightStatus
from weft.gateway.admission.authenticate import bearer
from weft.gateway.api.answer import JSON, json_body
from weft.gateway.api.call import Context, begin_answer, call_facts
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.trainer.bodies import (
    CheckWeightsBody,
    ContinueGenerationBody,
    PauseGenerationBody,
    UpdateFromDiskBody,
)
from weft.gateway.catalogue import Catalogue
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.weights import MeshWeights
from weft.gateway.validate import invalid
from weft.v1 import dialects_pb2, dialects_pb2_grpc

_MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "wait": "wait",
    "keep": "keep",
    "retract": "retract",
}
_SGLANG_MODES: Mapping[str, PauseMode] = {
    "abort": "abort",
    "in_place": "keep",
    "retract": "retract",
}


class TrainersOff(WeftError):
    """The settings do not allow trainers' calls."""

    reason = "TRAINERS_OFF"
    grpc_code = "NOT_FOUND"
    http_status = 404


class TrainerFace(dialects_pb2_grpc.TrainerServiceServicer):
    """Args:
    access: Tells who has the operators' token.
    is_on: Whether the settings allow these calls.
    """

    def __init__(
        self,
        weights: MeshWeights,
        access: MeshAccess,
        models: Catalogue,
        bodies: BodyParser,
        *,
        is_on: bool,
    ) -> None:
        self._weights = weights
        self._access = access
        self._models = models
        self._bodies = bodies
        self._is_on = is_on

    async def PauseWorkers(
        self, request: dialects_pb2.PauseWorkersRequest, context: Context
    ) -> HttpBody:
        token = self._token(context)
        mode = _MODES.get(request.mode or "abort")
        if mode is None:
            raise invalid("mode", f"must be one of {', '.join(_MODES)}")
        found = await self._weights.pause(mode, token)
        if request.clear_cache:
            await self._weights.flush(token)
        return _answer("paused", found)

    async def ResumeWorkers(self, request: Empty, context: Context) -> HttpBody:
        return _answer("resumed", await self._weights.resume(self._token(context)))

    async def IsPaused(self, request: Empty, context: Context) -> HttpBody:
        found = await self._weights.show(self._token(context), packed_digest=False)
        return json_body({"is_paused": any(status.pause for status in found.values())})

    async def PauseGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "pause")
        body, _ = await self._bodies.parse(PauseGenerationBody, _or_empty(request), _same)
        found = await self._weights.pause(_SGLANG_MODES[body.mode or "abort"], token)
        await begin_answer(context, facts.request_id)
        return _answer("paused", found)

    async def ContinueGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "continue")
        await self._bodies.parse(ContinueGenerationBody, _or_empty(request), _same)
        found = await self._weights.resume(token)
        await begin_answer(context, facts.request_id)
        return _answer("resumed", found)

    async def UpdateWeightsFromDisk(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "update")
        body, _ = await self._bodies.parse(UpdateFromDiskBody, request, _same)
        if body.abort_all_requests:
            await self._weights.pause("abort", token)
        found = await self._weights.refit(body.model_path, body.weight_version or "", token)
        if body.abort_all_requests and not body.keep_pause:
            found = await self._weights.resume(token)
        await begin_answer(context, facts.request_id)
        return _answer("weights changed", found)

    async def FlushCache(self, request: Empty, context: Context) -> HttpBody:
        flushed = await self._weights.flush(self._token(context))
        return json_body({"success": True, "message": f"{flushed} pages flushed"})

    async def CheckWeights(self, request: HttpBody, context: Context) -> HttpBody:
        token = self._token(context)
        facts = call_facts(context, "check")
        await self._bodies.parse(CheckWeightsBody, request, _same)
        found = await self._weights.show(token, packed_digest=True)
        await begin_answer(context, facts.request_id)
        return _answer("checksums", found)

    async def ShowServer(
        self, request: dialects_pb2.ShowServerRequest, context: Context
    ) -> HttpBody:
        found = await self._weights.show(self._token(context), packed_digest=False)
        card = self._models.first.model
        return json_body(
            {
                "model_path": card.name,
                "served_model_name": card.name,
                "version": version(),
                "weight_version": _version(found),
                "workers": {worker: _told(status) for worker, status in found.items()},
            }
        )

    def _token(self, context: Context) -> str:
        """The operators' token of the call. Raises TrainersOff or as `check_operate`."""
        if not self._is_on:
            raise TrainersOff(
                "trainers' calls are off: start the gateway with --rl and --console operate",
                stage="authorize",
            )
        self._access.check_operate(context)
        return bearer(context.invocation_metadata())


def _same(body: object) -> None: ...


def _or_empty(request: HttpBody) -> HttpBody:
    return request if request.data else HttpBody(content_type=JSON, data=b"{}")


def _answer(message: str, found: Mapping[str, WeightStatus]) -> HttpBody:
    return json_body(
        {
            "success": True,
            "message": message,
            "weight_version": _version(found),
            "workers": {worker: _told(status) for worker, status in found.items()},
        }
    )


def _version(found: Mapping[str, WeightStatus]) -> str:
    versions = {status.version for status in found.values()}
    return versions.pop() if len(versions) == 1 else ""


def _told(status: WeightStatus) -> dict[str, object]:
    told: dict[str, object] = {
        "state": status.state,
        "version": status.version,
        "model_digest": status.model_digest.hex(),
        "pause": status.pause,
        "updates": status.num_updates,
        "problem": status.problem,
    }
    if status.packed_digest:
        told["packed_digest"] = status.packed_digest.hex()
    return told
