"""What trainers ask for, in the forms of vLLM and of SGLang: weft.v1.TrainerService."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import TypeVar

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from weft.common.rpc.errors import Context
from weft.contract.errors import WeftError
from weft.contract.version import version
from weft.contract.weights import (
    SLEEP_TAGS,
    PauseMode,
    SentTensor,
    TensorHandle,
    WeightGroup,
    WeightStatus,
)
from weft.gateway.admission.authenticate import bearer
from weft.gateway.api.answer import EVENTS, JSON, field_names, json_body, or_empty
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.bodies import Body
from weft.gateway.api.openai.chunks import DONE, large_to_json, to_json, usage_json
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.relay import EdgeFace
from weft.gateway.api.trainer.bodies import (
    AbortRequestsBody,
    BeginUpdateBody,
    CheckWeightsBody,
    ContinueGenerationBody,
    DestroyGroupBody,
    EndUpdateBody,
    FinishUpdateBody,
    InitGroupBody,
    InitTransferBody,
    LentHandle,
    LoadsAnswer,
    MemoryBody,
    NoBody,
    PauseGenerationBody,
    StartUpdateBody,
    UpdateBody,
    UpdateFromDiskBody,
    UpdateFromDistributedBody,
    UpdateFromPeerBody,
    UpdateFromTensorBody,
    WorkerLoad,
)
from weft.gateway.api.trainer.token_answers import SglangWriter, VllmWriter
from weft.gateway.api.trainer.token_bodies import ContinueTokensBody, GenerateTokensBody
from weft.gateway.api.trainer.token_requests import continue_request, generate_request, is_list
from weft.gateway.catalogue import Catalogue
from weft.gateway.console.access import MeshAccess
from weft.gateway.console.weights import MeshWeights
from weft.gateway.generation.answer import Answer, Delta
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.validate import invalid
from weft.v1 import dialects_pb2, dialects_pb2_grpc

W = TypeVar("W", SglangWriter, VllmWriter)
OnMemory = Callable[[Sequence[str], str], Awaitable[Mapping[str, WeightStatus]]]
_LARGE_TOKENS = 1024
B = TypeVar("B", bound=Body)
_VLLM_GROUP = "vllm"
"""vLLM's trainers have one group, without a name."""
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


class WeightsDiffer(WeftError):
    """What lies in memory is not what a trainer had noted."""

    reason = "WEIGHTS_DIFFER"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class TrainerFace(dialects_pb2_grpc.TrainerServiceServicer):
    """Args:
    access: Tells who has the operators' token.
    is_on: Whether the settings allow these calls.
    """

    def __init__(
        self,
        pipeline: RequestPipeline,
        weights: MeshWeights,
        access: MeshAccess,
        models: Catalogue,
        bodies: BodyParser,
        relays: EdgeFace,
        *,
        is_on: bool,
    ) -> None:
        self._pipeline = pipeline
        self._weights = weights
        self._access = access
        self._models = models
        self._bodies = bodies
        self._relays = relays
        self._is_on = is_on
        self._noted: Mapping[str, bytes] = {}

    async def PauseWorkers(
        self, request: dialects_pb2.PauseWorkersRequest, context: Context
    ) -> HttpBody:
        token = self._token(context)
        mode = _mode(request.mode)
        found = await self._weights.pause(mode, token)
        if request.clear_cache:
            await self._weights.flush(token)
        return _answer("paused", found)

    async def ResumeWorkers(self, request: Empty, context: Context) -> HttpBody:
        return _answer("resumed", await self._weights.resume(self._token(context)))

    async def IsPaused(self, request: Empty, context: Context) -> HttpBody:
        return json_body({"is_paused": await self._is_paused(self._token(context))})

    async def _is_paused(self, token: str) -> bool:
        found = await self._weights.show(token)
        return any(status.pause for status in found.values())

    async def PauseGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(PauseGenerationBody, request, context)
        found = await self._weights.pause(_SGLANG_MODES[body.mode or "abort"], token)
        return _answer("paused", found)

    async def ContinueGeneration(self, request: HttpBody, context: Context) -> HttpBody:
        _, token = await self._order(ContinueGenerationBody, request, context)
        return _answer("resumed", await self._weights.resume(token))

    async def AbortRequests(self, request: HttpBody, context: Context) -> HttpBody:
        _, token = await self._order(AbortRequestsBody, request, context)
        await self._abort_all(token)
        return _answer("ended", await self._weights.show(token))

    async def ShowLoads(self, request: dialects_pb2.ShowLoadsRequest, context: Context) -> HttpBody:
        self._token(context)
        loads = [
            WorkerLoad(
                worker=worker,
                num_running_reqs=load.running_requests,
                num_waiting_reqs=load.waiting_requests + load.filling_requests,
            )
            for worker, load in self._weights.loads().items()
        ]
        queued = self._pipeline.num_queued
        loads.append(WorkerLoad(worker="", num_running_reqs=0, num_waiting_reqs=queued))
        return json_body(LoadsAnswer(loads=loads).model_dump())

    async def UpdateWeightsFromDisk(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(UpdateFromDiskBody, request, context)
        self._weights.check_one_model()
        aborts, resumes = bool(body.abort_all_requests), False
        if aborts and not body.keep_pause:
            resumes = not await self._is_paused(token)
        async with self._aborted(token, resumes=resumes) if aborts else nullcontext():
            found = await self._weights.refit(body.model_path, body.weight_version or "", token)
        if resumes:
            found = await self._weights.resume(token)
        return _answer("weights changed", found)

    @asynccontextmanager
    async def _aborted(self, token: str, *, resumes: bool) -> AsyncGenerator[None]:
        """All requests are ended, and none begins meanwhile; with `resumes`, they may again if
        something fails.
        """
        try:
            await self._weights.pause("abort", token)
            yield
        except BaseException:
            if resumes:
                with suppress(WeftError):  # The caller hears of the first failure.
                    await self._weights.resume(token)
            raise

    # -- updates through a trainer's process group -------------------------------------------------

    async def InitWeightsUpdateGroup(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(InitGroupBody, request, context)
        group = WeightGroup(
            name=body.group_name,
            address=body.master_address,
            port=body.master_port,
            rank=body.rank_offset,
            size=body.world_size,
            backend=body.backend,
        )
        return _answer("joined", await self._weights.join(group, token))

    async def DestroyWeightsUpdateGroup(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(DestroyGroupBody, request, context)
        return _answer("left", await self._weights.leave(body.group_name, token))

    async def BeginWeightUpdate(self, request: HttpBody, context: Context) -> HttpBody:
        _, token = await self._order(BeginUpdateBody, request, context)
        return _answer("begun", await self._weights.begin(token))

    async def UpdateWeightsFromDistributed(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(UpdateFromDistributedBody, request, context)
        tensors = _tensors(body.names, body.dtypes, body.shapes)
        if body.abort_all_requests:
            self._weights.check_one_model()
            await self._abort_all(token)
        found = await self._weights.receive(
            body.group_name, tensors, token, packed_bytes=0, version=body.weight_version or ""
        )
        return _answer("received", found)

    async def _abort_all(self, token: str) -> None:
        """Ends all requests, unless an update is under way, whose first call has done so."""
        before = (await self._weights.show(token)).values()
        if any(status.state == "updating" for status in before):
            return
        resumes = not any(status.pause for status in before)
        async with self._aborted(token, resumes=resumes):
            pass
        if resumes:
            await self._weights.resume(token)

    async def EndWeightUpdate(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(EndUpdateBody, request, context)
        found = await self._weights.end(body.weight_version or "", token)
        return _answer("weights changed", found)

    async def UpdateWeightsFromTensor(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(UpdateFromTensorBody, request, context)
        tensors = _tensors(body.names, body.dtypes, body.shapes, body.handles)
        version = body.weight_version or ""
        found = await self._weights.receive("", tensors, token, version=version)
        return _answer("weights received", found)

    async def UpdateWeightsFromPeer(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(UpdateFromPeerBody, request, context)
        found = await self._weights.copy(body.worker, body.weight_version or "", token)
        return _answer("weights copied", found)

    async def UpdateWeightsFromIpc(self, request: HttpBody, context: Context) -> HttpBody:
        raise self._pickled(context)

    async def InitWeightTransferEngine(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(InitTransferBody, request, context)
        info = body.init_info
        try:
            number = base64.b64decode(info.nccl_unique_id_b64 or "", validate=True)
        except ValueError as error:
            raise invalid("init_info.nccl_unique_id_b64", "is not base64") from error
        group = WeightGroup(
            name=_VLLM_GROUP,
            address=info.master_address or "",
            port=info.master_port or 0,
            rank=info.rank_offset,
            size=info.world_size,
            backend=info.backend,
            rendezvous="vllm" if info.backend == "nccl" else "torch",
            nccl_id=number,
            packed_bytes=info.packed_buffer_size_bytes if info.packed else 0,
        )
        return _answer("joined", await self._weights.join(group, token))

    async def StartWeightUpdate(self, request: HttpBody, context: Context) -> HttpBody:
        _, token = await self._order(StartUpdateBody, request, context)
        return _answer("begun", await self._weights.begin(token))

    async def UpdateWeights(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(UpdateBody, request, context)
        info = body.update_info
        packed = None if info.packed is None else info.packed * info.packed_buffer_size_bytes
        tensors = _tensors(info.names, info.dtype_names, info.shapes, info.handles)
        found = await self._weights.receive(
            "" if info.handles else _VLLM_GROUP, tensors, token, packed_bytes=packed
        )
        return _answer("received", found)

    async def FinishWeightUpdate(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(FinishUpdateBody, request, context)
        found = await self._weights.end(body.weight_version or "", token)
        return _answer("weights changed", found)

    async def ShutdownWeightTransferEngine(self, request: HttpBody, context: Context) -> HttpBody:
        _, token = await self._order(NoBody, request, context)
        return _answer("left", await self._weights.leave(_VLLM_GROUP, token))

    async def GetWorldSize(
        self, request: dialects_pb2.GetWorldSizeRequest, context: Context
    ) -> HttpBody:
        found = await self._weights.show(self._token(context))
        return json_body({"world_size": sum(status.num_ranks for status in found.values())})

    async def GetWeightVersion(self, request: Empty, context: Context) -> HttpBody:
        found = await self._weights.show(self._token(context))
        return json_body({"weight_version": _version(found)})

    async def FlushCache(self, request: Empty, context: Context) -> HttpBody:
        flushed = await self._weights.flush(self._token(context))
        return json_body({"success": True, "message": f"{flushed} pages flushed"})

    async def CheckWeights(self, request: HttpBody, context: Context) -> HttpBody:
        body, token = await self._order(CheckWeightsBody, request, context)
        found = await self._weights.show(token, packed_digest=True)
        digests = {worker: status.packed_digest for worker, status in found.items()}
        if body.action == "snapshot":
            self._noted = digests
        if body.action == "compare":
            self._compare(digests)
        return _answer(f"{body.action}: done", found)

    def _compare(self, digests: Mapping[str, bytes]) -> None:
        if not self._noted:
            raise invalid("action", "this gateway has noted nothing; send `snapshot` before")
        other = [worker for worker in digests if digests[worker] != self._noted.get(worker)]
        if other:
            raise WeightsDiffer(
                f"the weights of {', '.join(other)} are not those of the snapshot", stage="weights"
            )

    async def SleepWorkers(
        self, request: dialects_pb2.SleepWorkersRequest, context: Context
    ) -> HttpBody:
        token = self._token(context)
        mode = _mode(request.mode)
        level = request.level if request.HasField("level") else 1
        if level not in (1, 2):
            raise invalid("level", "must be 1 or 2; for 0 use /pause")
        found = await self._weights.sleep(level, _tags(request.tags), mode, token)
        return _answer("asleep", found)

    async def WakeWorkers(
        self, request: dialects_pb2.WakeWorkersRequest, context: Context
    ) -> HttpBody:
        token = self._token(context)
        return _answer("awake", await self._weights.wake(_tags(request.tags), token))

    async def IsSleeping(self, request: Empty, context: Context) -> HttpBody:
        found = await self._weights.show(self._token(context))
        return json_body({"is_sleeping": any(status.asleep for status in found.values())})

    async def ReleaseMemory(self, request: HttpBody, context: Context) -> HttpBody:
        return await self._on_memory(
            request,
            context,
            "asleep",
            lambda tags, token: self._weights.sleep(1, tags, "abort", token),
        )

    async def ResumeMemory(self, request: HttpBody, context: Context) -> HttpBody:
        return await self._on_memory(request, context, "awake", self._weights.wake)

    async def _on_memory(
        self, request: HttpBody, context: Context, message: str, do: OnMemory
    ) -> HttpBody:
        body, token = await self._order(MemoryBody, request, context)
        tags = [tag for tag in body.tags or SLEEP_TAGS if tag != "cuda_graph"]
        if tags:
            found = await do(tags, token)
        else:
            found = await self._weights.show(token)
        return _answer(message, found)

    async def GenerateTokens(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        self._check_on()
        facts = call_facts(context, "gen")
        body, raw = await self._bodies.parse(
            GenerateTokensBody, request, lambda body: generate_request(body, facts)
        )
        with field_names({"prompt": "input_ids"}, {}):
            has_scores = "prompt_logprobs" in raw.given

            def write(answer: Answer) -> SglangWriter:
                return SglangWriter(
                    answer,
                    is_list=is_list(body),
                    names=body.rid if isinstance(body.rid, list) else (),
                    scores_from=(body.logprob_start_len or 0) if has_scores else None,
                    shows_texts=bool(body.return_text_in_logprobs),
                )

            async with self._pipeline.open(raw) as answer:
                writer = await self._collect(answer, write(answer), context, bool(body.stream))
                last: bytes = DONE
                if not body.stream:
                    last = await _encoded(writer, writer.whole)
            await context.write(HttpBody(content_type=_kind(bool(body.stream)), data=last))

    async def ContinueTokens(self, request: HttpBody, context: Context) -> None:  # type: ignore[override]
        self._check_on()
        facts = call_facts(context, "gen")
        body, raw = await self._bodies.parse(
            ContinueTokensBody, request, lambda body: continue_request(body, facts)
        )
        with field_names({"prompt": "token_ids"}, {}):
            async with self._pipeline.open(raw) as answer:
                writer = await self._collect(answer, VllmWriter(answer), context, bool(body.stream))
                usage, options = usage_json(answer.usage()), body.stream_options
                if not body.stream:
                    last = await _encoded(writer, lambda: writer.whole(usage))
                elif options is not None and options.include_usage:
                    last = writer.last_event({"usage": usage}) + DONE
                else:
                    last = DONE
            await context.write(HttpBody(content_type=_kind(bool(body.stream)), data=last))

    async def _collect(self, answer: Answer, writer: W, context: Context, is_streamed: bool) -> W:
        """Gives all deltas to the writer, and sends its events if the answer is streamed."""
        if is_streamed:
            await self._send_events(answer, writer, context)
        else:
            await begin_answer(context, answer.request.request_id, JSON, answer.headers)
            while deltas := await answer.next_deltas():
                for delta in deltas:
                    writer.push(delta)
        await answer.settle()
        return writer

    async def _send_events(
        self, answer: Answer, writer: SglangWriter | VllmWriter, context: Context
    ) -> None:
        with self._relays.stream_of(context, EVENTS) as out:
            headers = (*answer.headers, *out.headers)
            await begin_answer(context, answer.request.request_id, EVENTS, headers)

            def encode(deltas: list[Delta]) -> bytes:
                for delta in deltas:
                    writer.push(delta)
                return b"".join([writer.event(delta) for delta in deltas])

            await answer.stream(encode, out)

    async def ShowServer(
        self, request: dialects_pb2.ShowServerRequest, context: Context
    ) -> HttpBody:
        found = await self._weights.show(self._token(context))
        card = self._models.first.model
        return json_body(
            {
                "model_path": card.name,
                "served_model_name": card.name,
                "version": version(),
                "weight_version": _version(found),
                "workers": {worker: _told(status) for worker, status in found.items()},
                "vllm_config": self._as_vllm(),
            }
        )

    def _as_vllm(self) -> dict[str, object]:
        """What vLLM's trainers read of its configuration."""
        served = self._models.first
        infos = [one.info for one in self._weights.fleet.workers() if one.info is not None]
        infos = [one for one in infos if one.model == served.model.name] or infos
        limits = [one.adapters for one in infos if one.HasField("adapters")]
        lora = {
            "max_lora_rank": min((one.max_rank for one in limits), default=0),
            "max_loras": min((one.max_device_adapters for one in limits), default=0),
        }
        dtype = infos[0].dtype if infos else ""
        return {
            "model_config": {
                "dtype": f"torch.{dtype}",
                "max_model_len": served.context_tokens,
            },
            "lora_config": lora if limits else None,
            # The gateway brings each call to all workers.
            "parallel_config": {"data_parallel_size": 1},
        }

    async def _order(self, kind: type[B], request: HttpBody, context: Context) -> tuple[B, str]:
        """The body of an order, and the operators' token. Raises as `_token` before it is read."""
        token = self._token(context)
        facts = call_facts(context, "weights")
        body, _ = await self._bodies.parse(kind, or_empty(request), _same)
        await begin_answer(context, facts.request_id)
        return body, token

    def _pickled(self, context: Context) -> WeftError:
        self._token(context)
        return invalid(
            "zmq_handles",
            "its tensors are pickled, and unpickling runs what their sender wants: use "
            "/update_weights_from_tensor with `handles`, or /update_weights_from_distributed",
        )

    def _token(self, context: Context) -> str:
        """The operators' token of the call. Raises TrainersOff or as `check_operate`."""
        self._check_on()
        self._access.check_operate(context)
        return bearer(context.invocation_metadata())

    def _check_on(self) -> None:
        if not self._is_on:
            raise TrainersOff(
                "trainers' calls are off: start the gateway with --rl and --console operate",
                stage="authorize",
            )


def _mode(given: str) -> PauseMode:
    mode = _MODES.get(given or "abort")
    if mode is None:
        raise invalid("mode", f"must be one of {', '.join(_MODES)}")
    return mode


def _tags(given: Sequence[str]) -> list[str]:
    """Raises InvalidRequest for a tag that is not known."""
    tags = [tag for text in given for tag in text.split(",") if tag]
    if not set(tags) <= set(SLEEP_TAGS):
        raise invalid("tags", f"must be {' or '.join(SLEEP_TAGS)}")
    return tags


def _kind(is_streamed: bool) -> str:
    return EVENTS if is_streamed else JSON


async def _encoded(writer: SglangWriter | VllmWriter, make: Callable[[], object]) -> bytes:
    """Encodes large answers in a thread."""
    if writer.num_tokens < _LARGE_TOKENS:
        return to_json(make())
    return await asyncio.to_thread(lambda: large_to_json(make()))


def _tensors(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[Sequence[int]],
    handles: Sequence[Sequence[LentHandle]] | None = None,
) -> list[SentTensor]:
    """Without `handles`, a group brings the tensors."""
    lent = [()] * len(names) if handles is None else handles
    if not len(names) == len(dtypes) == len(shapes) == len(lent):
        raise invalid("names", "names, dtypes, shapes and handles must be of one length")
    if not names:
        raise invalid("names", "give at least one tensor")
    return [
        SentTensor(
            name=name,
            dtype=dtype.removeprefix("torch."),
            shape=list(shape),
            handles=[_handle(one) for one in own],
        )
        for name, dtype, shape, own in zip(names, dtypes, shapes, lent, strict=True)
    ]


def _handle(given: LentHandle) -> TensorHandle:
    try:
        data = base64.b64decode(given.handle, validate=True)
    except ValueError as error:
        raise invalid("handles", "a handle is not base64") from error
    return TensorHandle(gpu=given.gpu, handle=data, shm=given.shm, offset=given.offset)


def _same(body: object) -> None: ...


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
        "asleep": list(status.asleep),
        "updates": status.num_updates,
        "ranks": status.num_ranks,
        "groups": status.groups,
        "problem": status.problem,
    }
    if status.packed_digest:
        told["packed_digest"] = status.packed_digest.hex()
    return told
