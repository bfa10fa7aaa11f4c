"""What tools, probes and load balancers made for other servers ask for: weft.v1.ServerService."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from google.api.httpbody_pb2 import HttpBody
from google.protobuf.empty_pb2 import Empty
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from weft.common.rpc.errors import Context
from weft.contract.errors import PermissionDenied, WeftError
from weft.contract.experts import ExpertAction
from weft.contract.tasks import Task
from weft.contract.version import version
from weft.gateway.admission.authenticate import bearer, current_tenant
from weft.gateway.api.answer import json_body, or_empty
from weft.gateway.api.call import begin_answer, call_facts
from weft.gateway.api.openai.parse import BodyParser
from weft.gateway.api.server.profiles import (
    ProfileBody,
    ProfileCalls,
    StopProfileBody,
    profile_order,
)
from weft.gateway.catalogue import Catalogue
from weft.gateway.console.weights import MeshWeights
from weft.gateway.generation.pipeline import RequestPipeline
from weft.gateway.media.clips import Spectrogram
from weft.gateway.request import CallFacts, ClipPrompt, PoolingOptions, RawRequest, TokenPrompt
from weft.gateway.text.model_card import ModelCard
from weft.v1 import dialects_pb2, dialects_pb2_grpc

_PROBE_S = 10.0
"""Time limit of one probe."""
_PROBE_AGE_S = 1.0
"""A successful probe answers all calls that come within this time."""


class MetricsNotServed(WeftError):
    """The settings do not allow metrics on the REST port."""

    reason = "METRICS_NOT_SERVED"
    grpc_code = "NOT_FOUND"
    http_status = 404


class GenerationProbe:
    """Generates one token of every model; calls share one probe at a time, and its result."""

    def __init__(self, pipeline: RequestPipeline, models: Catalogue) -> None:
        self._pipeline = pipeline
        self._models = models
        self._task: asyncio.Task[None] | None = None
        self._good_until = 0.0

    async def check(self) -> None:
        """Returns once every model has generated a token, now or within the last second. Raises
        WeftError if a model could not.
        """
        loop = asyncio.get_running_loop()
        if loop.time() < self._good_until:
            return
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._probe())
            # All callers may have left, so its failure is read here.
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(self._task)

    async def _probe(self) -> None:
        current_tenant.set(None)  # The probe must not be charged to the caller's tenant.
        for served in self._models:
            raw = RawRequest(
                call=CallFacts(f"health-{secrets.token_hex(16)}", timeout_s=_PROBE_S),
                model=served.model.name,
                prompts=(_prompt_of(served.model),),
                given={"temperature": 0.0, "max_tokens": 1, "ignore_eos": True},
                pooling=_probe_of(served.task),
            )
            async with self._pipeline.open(raw) as answer:
                while await answer.next_deltas():
                    pass
        self._good_until = asyncio.get_running_loop().time() + _PROBE_AGE_S


def _prompt_of(card: ModelCard) -> TokenPrompt:
    if (speech := card.speech) is None:
        return TokenPrompt(ids=(0,))
    audio = speech.audio
    silence = Spectrogram(b"", "silence", audio.num_mels, 0).clip(0, audio.num_frames)
    ids = (*[speech.end] * audio.num_rows, speech.start)
    return ClipPrompt(ids=ids, clip=silence, num_rows=audio.num_rows)


def _probe_of(task: Task) -> PoolingOptions | None:
    if task == "embed":
        return PoolingOptions(output="embedding")
    if task == "classify":
        return PoolingOptions(output="classes")
    return PoolingOptions(output="label_logits", label_ids=(0,)) if task == "score" else None


class ServerFace(dialects_pb2_grpc.ServerServiceServicer):
    def __init__(
        self,
        pipeline: RequestPipeline,
        models: Catalogue,
        registry: CollectorRegistry,
        ready: Callable[[], Awaitable[object]],
        bodies: BodyParser,
        profiles: ProfileCalls,
        weights: MeshWeights,
        *,
        serves_metrics: bool,
        asks_for_keys: bool,
    ) -> None:
        """`ready` raises WeftError unless requests can be served. With `serves_metrics` the
        settings allow metrics on the REST port. With `asks_for_keys` callers bring API keys, and
        not every key may read metrics.
        """
        self._models = models
        self._registry = registry
        self._ready = ready
        self._bodies = bodies
        self._profiles = profiles
        self._weights = weights
        self._serves_metrics = serves_metrics
        self._asks_for_keys = asks_for_keys
        self._probe = GenerationProbe(pipeline, models)

    async def ShowVersion(self, request: Empty, context: Context) -> HttpBody:
        return json_body({"version": version()})

    async def Ping(self, request: Empty, context: Context) -> HttpBody:
        await self._ready()
        return json_body({})

    async def HealthGenerate(self, request: Empty, context: Context) -> HttpBody:
        await self._probe.check()
        return json_body({"status": "ok"})

    async def TokenizerInfo(
        self, request: dialects_pb2.TokenizerInfoRequest, context: Context
    ) -> HttpBody:
        resolved = await self._models.find(request.model)
        card = await self._models.card(resolved)
        added = card.tokenizer.get_added_tokens_decoder()
        return json_body(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model": resolved.name,
                "model_max_length": resolved.served.context_tokens,
                "vocab_size": card.tokenizer.get_vocab_size(),
                "eos_token_ids": sorted(card.eos_ids),
                "added_tokens_decoder": {
                    str(id_): {"content": token.content, "special": token.special}
                    for id_, token in sorted(added.items())
                },
                "has_chat_template": card.template is not None,
            }
        )

    async def Metrics(self, request: Empty, context: Context) -> HttpBody:
        if not self._serves_metrics:
            raise MetricsNotServed(
                "metrics are not served here: see --metrics-port, or set --rest-metrics of the "
                "gateway",
                stage="authorize",
            )
        tenant = current_tenant.get()
        if self._asks_for_keys and (tenant is None or not tenant.manages_adapters):
            raise PermissionDenied(
                "this API key may not read metrics; one made by `weft keys add TENANT --adapters` "
                "may",
                stage="authorize",
            )
        text = await asyncio.to_thread(generate_latest, self._registry)
        return HttpBody(content_type=CONTENT_TYPE_LATEST, data=text)

    async def StartProfile(self, request: HttpBody, context: Context) -> HttpBody:
        self._profiles.check_caller(context)
        facts = call_facts(context, "profile")
        _, order = await self._bodies.parse(ProfileBody, or_empty(request), profile_order)
        answer = await self._profiles.start(order, context)
        await begin_answer(context, facts.request_id)
        return json_body(answer)

    async def StopProfile(self, request: HttpBody, context: Context) -> HttpBody:
        self._profiles.check_caller(context)
        facts = call_facts(context, "profile")
        await self._bodies.parse(StopProfileBody, or_empty(request), lambda body: None)
        answer = await self._profiles.stop()
        await begin_answer(context, facts.request_id)
        return json_body(answer)

    async def StartExpertRecord(self, request: Empty, context: Context) -> HttpBody:
        return await self._experts("start", context)

    async def StopExpertRecord(self, request: Empty, context: Context) -> HttpBody:
        return await self._experts("stop", context)

    async def DumpExpertRecord(self, request: Empty, context: Context) -> HttpBody:
        return await self._experts("dump", context)

    async def BalanceExperts(self, request: Empty, context: Context) -> HttpBody:
        return await self._experts("balance", context)

    async def _experts(self, action: ExpertAction, context: Context) -> HttpBody:
        self._profiles.check_caller(context)
        found = await self._weights.experts(action, bearer(context.invocation_metadata()))
        return json_body({"workers": {name: asdict(state) for name, state in found.items()}})
