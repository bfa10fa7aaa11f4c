"""One worker as this gateway sees it: reachability, freshness, load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import grpc
from weft.common.rpc.breaker import Breaker
from weft.common.rpc.channel import open_channel
from weft.common.rpc.errors import from_rpc_error
from weft.common.rpc.start import StartProgress, progress_of
from weft.common.rpc.tls import Identity
from weft.common.tasks import is_ending, log_failure, run_together
from weft.contract.codec.pairs import WORKER_ROLES
from weft.contract.codec.walk import duration
from weft.contract.errors import Draining, Internal, PeerUnavailable, WeftError
from weft.contract.layout import CacheLayout, PagedPlane, StatePart, StatePlane
from weft.contract.settings import RoleName
from weft.gateway.fleet.discovery import Endpoint
from weft.gateway.fleet.kv_follow import KvFollower
from weft.gateway.fleet.media_feed import MediaFeed
from weft.gateway.fleet.session import DecodeSession, ReconnectBackoff
from weft.gateway.fleet.versions import ServedVersions
from weft.gateway.fleet.worker_ids import WorkerIds
from weft.gateway.routing import LoadEstimate, Throughput, WorkerView
from weft.gateway.settings import GatewaySettings
from weft.gateway.text.model_card import ModelCard
from weft.v1 import worker_pb2, worker_pb2_grpc

_log = logging.getLogger(__name__)

_INFO_TIMEOUT_S = 5.0
_MAX_SILENCE_S = 5.0
"""Longest time without a load report: a worker's server sends them whatever its engine does."""
_ON_DEVICE = (worker_pb2.ADAPTER_STATE_DEVICE,)
_HELD = (
    worker_pb2.ADAPTER_STATE_DEVICE,
    worker_pb2.ADAPTER_STATE_HOST,
    worker_pb2.ADAPTER_STATE_DISK,
)


class FleetWorker:
    """One worker endpoint: follows its load, and keeps the Session of a decode worker.

    The worker itself reports which model it serves.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        models: Mapping[str, ModelCard],
        settings: GatewaySettings,
        gateway_id: str,
        gateway_epoch: int,
        on_session_lost: Callable[[], None],
        expects_constraints: Callable[[], bool],
        make_follower: Callable[[worker_pb2_grpc.WorkerServiceAsyncStub, str], KvFollower | None],
        worker_ids: WorkerIds,
        versions: ServedVersions,
        identity: Identity | None = None,
    ) -> None:
        """Stores the settings; opens no connection yet.

        Args:
            models: The models that the gateway serves, by name.
            gateway_epoch: Epoch of this gateway's incarnation.
            on_session_lost: Called when a Session breaks.
            expects_constraints: Returns whether the gateway has seen constrained requests.
            make_follower: Creates the follower of a worker's KV events, if a policy needs them.
            worker_ids: Ids of all endpoints.
            versions: Which workers have the weights of the last update.
            identity: None: without TLS.
        """
        self.endpoint = endpoint
        self._models = models
        self._settings = settings
        self._channel = open_channel(endpoint.address, endpoint.role, identity)
        self.start: StartProgress | None = None
        """Progress of its start; None: it is not starting, or does not report."""
        self.stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        """The worker's own calls, on the connection that reports its load."""
        self.media = MediaFeed(self.stub)
        """Brings media of prompts to the worker."""
        self._failure = "not reached yet"
        self._load: worker_pb2.WatchLoadResponse | None = None
        self._load_time = 0.0
        self._adapters: dict[bytes, worker_pb2.AdapterStatus] = {}
        self.load = LoadEstimate()
        """The worker's load, as far as this gateway can tell."""
        self.member: WorkerView | None = None
        """The routing view of its incarnation; None: it has not reported yet."""
        self.breaker = Breaker(settings.breaker_failures, settings.breaker_open_s)
        self._on_session_lost = on_session_lost
        self._make_follower = make_follower
        self._follower: tuple[str, KvFollower] | None = None
        """Follower of its KV events, with the model whose index it updates."""
        self._following: asyncio.Task[None] | None = None
        self._worker_ids = worker_ids
        self._versions = versions
        self._is_followed = False
        self.info: worker_pb2.GetInfoResponse | None = None
        self.session: DecodeSession | None = None
        if endpoint.role == "decode":
            self.session = DecodeSession(
                self._channel,
                gateway_id,
                gateway_epoch,
                on_silence=self._channel.renew,
                ping_interval_s=settings.ping_interval_s,
                dead_after_s=settings.stale_after_s,
                on_lost=self._lost,
                expects_constraints=expects_constraints,
            )

    async def run(self) -> None:
        """Follows the worker until cancelled."""
        try:
            session = [] if self.session is None else [self.session.run()]
            await run_together(self._watch(), *session)
        finally:
            if self.info is not None:
                self._versions.forget(self.info.model, self.info.worker_id)
            self._worker_ids.release(self)
            self._forget()
            await self._channel.close()

    async def _watch(self) -> None:
        backoff = ReconnectBackoff()
        while True:
            try:
                await self._follow(backoff)
            except grpc.aio.AioRpcError as error:
                self.start = progress_of(error)
                backoff.failed(error)
                known = from_rpc_error(error)
                self._failure = str(known) if self.start else f"not reachable: {known}"
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._dial_anew()
            except PeerUnavailable as error:
                if error.message != self._failure:
                    what = {"worker": str(self.endpoint), "reason": error.message}
                    _log.warning("a worker gets no requests", extra=what)
                self._failure = error.message
            except asyncio.CancelledError:
                if is_ending():
                    raise
                self._failure = "its connection was closed"
            except TimeoutError:
                self._failure = "sends no load reports"
                self._dial_anew()
                if self.session is not None:
                    self.session.stale_after_s = 0.0
            except Exception:
                # The fault is this gateway's, so the worker stays in use.
                _log.exception("following a worker failed", extra={"worker": str(self.endpoint)})
                self._failure = "could not be followed"
            self._load = None
            self._adapters = {}
            await backoff.sleep()

    def _dial_anew(self) -> None:
        """Keeps the connection if an open Session shows that it is alive."""
        if self.session is None or not self.session.is_open:
            self._channel.renew()

    async def _follow(self, backoff: ReconnectBackoff) -> None:
        info = await self.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S)
        self.start = None
        self._check(info)
        self._worker_ids.take(self, info)
        self.info, self.member = info, _member(self.endpoint, info)
        interval = duration(self._settings.load_interval_s)
        call: Any = self.stub.WatchLoad(
            worker_pb2.WatchLoadRequest(interval=interval, adapter_changes=True)
        )
        try:
            self._is_followed = True
            while True:
                async with asyncio.timeout(self._stale_limit_s()):
                    report = await call.read()
                if report is grpc.aio.EOF:
                    raise PeerUnavailable("stopped sending load reports")
                if report.epoch != info.epoch:
                    raise PeerUnavailable("was restarted")
                if self.info is not info:
                    raise PeerUnavailable("is draining, and another worker has its id")
                self._take(report)
                backoff.reset()
                self._follow_pages(info)
        finally:
            self._is_followed = False
            call.cancel()
            self._stop_following_pages()

    def _follow_pages(self, info: worker_pb2.GetInfoResponse) -> None:
        follower = self._follower_of(info.model)
        if self._following is None and follower is not None:
            self._following = asyncio.create_task(follower.run(info))
            self._following.add_done_callback(log_failure)

    def _stop_following_pages(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    @property
    def is_in_service(self) -> bool:
        return self._is_followed and not (self._load is not None and self._load.draining)

    def step_back(self) -> None:
        self._stop_following_pages()
        self._forget()
        self.info = self.member = None

    def _follower_of(self, model: str) -> KvFollower | None:
        """A new follower only if the worker serves another model now."""
        if self._follower is None or self._follower[0] != model:
            self._forget()
            made = self._make_follower(self.stub, model)
            self._follower = None if made is None else (model, made)
        return None if self._follower is None else self._follower[1]

    def _forget(self) -> None:
        if self._follower is not None:
            self._follower[1].forget()
            self._follower = None

    @property
    def model(self) -> str:
        """Name of the model that the worker serves; empty: unknown yet."""
        return "" if self.info is None else self.info.model

    @property
    def expert_group(self) -> str:
        """Names the workers that end with this one; empty: none do."""
        return "" if self.info is None else self.info.expert_group

    def _check(self, info: worker_pb2.GetInfoResponse) -> None:
        role = WORKER_ROLES[info.role]
        if role not in (self.endpoint.role, "both"):
            raise PeerUnavailable(
                f"is a {role or 'nameless'} worker, not a {self.endpoint.role} worker; "
                "correct the gateway's --decode or --prefill"
            )
        model = self._models.get(info.model)
        if model is None:
            names = " or ".join(repr(name) for name in self._models)
            raise PeerUnavailable(f"serves model {info.model!r}, not {names}")
        if info.vocabulary_size != model.vocabulary_size:
            raise PeerUnavailable(
                f"has a vocabulary of {info.vocabulary_size} tokens, the gateway's model "
                f"{model.vocabulary_size}: they were given different model directories"
            )

    def take_role(self, state: worker_pb2.RoleState) -> None:
        """What the worker answered when its role was set; the next report says it too."""
        if self._load is not None and self._load.role.changes < state.changes:
            self._load.role.CopyFrom(state)

    def _take(self, report: worker_pb2.WatchLoadResponse) -> None:
        if self._load is not None and report.role.changes < self._load.role.changes:
            report.role.CopyFrom(self._load.role)  # It was set after the report had been sent.
        self._load = report
        self._take_model(report.model_digest)
        if not report.adapters_are_changes:
            self._adapters = {}
        self._adapters |= {status.adapter.digest: status for status in report.adapters}
        for digest in report.gone_adapters:
            self._adapters.pop(digest, None)
        self._load_time = asyncio.get_running_loop().time()
        self.load.report(
            report.running_requests + report.waiting_requests + report.filling_requests,
            report.queued_tokens,
            report.request_tokens,
        )
        self.load.take_speed(
            Throughput(
                report.prefill_tokens_per_second,
                report.decode_step.ToNanoseconds() / 1e9,
                report.decode_step_requests,
            )
        )
        self._failure = ""
        if self.session is not None:
            self.session.stale_after_s = report.stale_after.ToNanoseconds() / 1e9

    def _take_model(self, digest: bytes) -> None:
        """A trainer may have changed the weights since the worker was asked."""
        if self.member is None:
            return
        if digest and self.member.model_digest != digest:
            self.member = replace(self.member, model_digest=digest)
        self._versions.report(self.model, self.member.worker_id, digest)

    def _stale_limit_s(self) -> float:
        """Silence after which the worker is stale: the worker's own limit, within bounds."""
        own_s = 0.0 if self._load is None else self._load.stale_after.ToNanoseconds() / 1e9
        own_s = min(own_s, _MAX_SILENCE_S)
        return max(self._settings.stale_after_s, own_s, 3 * self._settings.load_interval_s)

    def _lost(self) -> None:
        self._on_session_lost()
        if self._load is None or not self._load.draining:
            now = asyncio.get_running_loop().time()
            self.breaker.failed(now, "its session broke")

    @property
    def report(self) -> worker_pb2.WatchLoadResponse | None:
        """The newest load report; None: it sends none now."""
        return self._load

    @property
    def num_adapters(self) -> int:
        """Number of adapters that it reports."""
        return len(self._adapters)

    @property
    def own_requests(self) -> int:
        """Number of requests of this gateway on the worker now."""
        return self.load.own_requests

    @property
    def tokens_per_second(self) -> float:
        """Measured prefill rate, tokens per second; 0: unknown."""
        return 0.0 if self._load is None else self._load.prefill_tokens_per_second

    def adapter(self, digest: bytes) -> worker_pb2.AdapterStatus | None:
        """The worker's report about a content; None: none."""
        return self._adapters.get(digest)

    @property
    def adapter_generation(self) -> int:
        """Generation of the registry that it has applied; 0: none, or not reported."""
        return 0 if self._load is None else self._load.adapter_generation

    def holds(self, digest: bytes, *, on_device: bool = False) -> bool:
        """Whether requests for the adapter with a content digest can be served there; empty: the
        base model, which every worker has. With `on_device`, the adapter must be on the worker's
        device already.
        """
        if not digest:
            return True
        status = self._adapters.get(digest)
        if status is None or status.unloading:
            return False
        return status.state in (_ON_DEVICE if on_device else _HELD)

    def has_context(self, num_tokens: int) -> bool:
        """Whether its context holds so many tokens of a request, as far as it is known."""
        limit = 0 if self.info is None else self.info.max_context_tokens
        return not limit or num_tokens <= limit

    def judge_request(self, error: WeftError | None, *, is_proven: bool) -> None:
        """Records the outcome of a request, for which `breaker.begin` was called.

        Args:
            error: How the worker failed it, if it did.
            is_proven: Whether the request had received anything from the worker.
        """
        # The loss of a Session counts once, in `_lost`, not for each of its requests.
        is_fault = isinstance(error, Internal) or (
            isinstance(error, PeerUnavailable)
            and not isinstance(error, Draining)
            and error.stage != "session"
        )
        if error is not None and is_fault:
            self.breaker.failed(asyncio.get_running_loop().time(), error.message)
        elif not is_proven:
            self.breaker.abandoned()

    def problem(self, now: float) -> str:
        """Why the worker gets no work of the endpoint's role; empty if it may. `now` is event loop
        time.
        """
        return self.fault(now) or self.other_role

    def fault(self, now: float) -> str:
        """Why the worker gets no work in any role; empty if it may."""
        return self.health_problem(now) or self.breaker.problem(now)

    @property
    def role(self) -> RoleName:
        """What the worker is used for now."""
        if self._load is not None and self._load.HasField("role"):
            return cast(RoleName, WORKER_ROLES[self._load.role.role]) or "both"
        has_both = self.info is not None and self.info.role == worker_pb2.WORKER_ROLE_BOTH
        return "both" if has_both else self.endpoint.role

    @property
    def other_role(self) -> str:
        """Why the worker gets no work of the endpoint's role while it is sound; empty if it may."""
        role = self.role
        return "" if role in (self.endpoint.role, "both") else f"its role is {role} now"

    @property
    def asleep(self) -> Sequence[str]:
        """What of the worker sleeps, by its last report."""
        return () if self._load is None else self._load.asleep

    @property
    def lacks_weights(self) -> bool:
        """Whether it has no version of the weights, by its last report."""
        return self._load is not None and self._load.weights.state == "failed"

    @property
    def weights_problem(self) -> str:
        """Why it has no version of the weights, by its last report."""
        return "" if self._load is None else self._load.weights.problem

    def health_problem(self, now: float) -> str:
        """Like `problem`, without the outcomes of earlier requests."""
        load = self._load
        if load is None:
            return self._failure
        if load.draining:
            return "draining"
        if self.asleep:
            return f"asleep ({', '.join(self.asleep)})"
        age_s = load.loop_age.ToNanoseconds() / 1e9
        if age_s > max(load.stale_after.ToNanoseconds() / 1e9, 0.1):
            return f"its engine's loop has not turned for {age_s:.1f} s"
        if now - self._load_time > self._stale_limit_s():
            return f"no load report for {now - self._load_time:.1f} s"
        if self.session is not None and not self.session.is_open:
            return self.session.problem
        if self.lacks_weights:
            return "has no version of the weights until an update ends"
        if self.member is not None and self._versions.is_outdated(
            self.model, self.member.worker_id
        ):
            return "has older weights than a trainer's last update; send it the update too"
        return ""

    def snapshot(self, now: float) -> dict[str, Any]:
        """The worker's state as this gateway knows it, for operators; `now` is event loop time."""
        known = {
            "role": self.role,
            "address": self.endpoint.address,
            "model": self.model,
            "problem": self.problem(now),
            "breaker": self.breaker.state(now).value,
            "own_requests": self.own_requests,
        }
        if self.session is not None:
            known |= {"is_session_open": self.session.is_open, **self.session.sizes()}
        load, member, info = self._load, self.member, self.info
        if load is None or member is None or info is None:
            return known
        return {
            **known,
            "worker_id": member.worker_id,
            "epoch": member.epoch,
            "host": member.host,
            "num_requests": self.load.num_requests,
            "queued_tokens": self.load.queued_tokens,
            "num_tokens": self.load.num_tokens,
            "tokens_per_second": load.prefill_tokens_per_second,
            "free_pages": load.free_pages + load.cached_pages,
            "total_pages": member.total_pages,
            "page_size": member.page_size,
            "model_digest": member.model_digest.hex(),
            "kv_layout": member.kv_layout,
            "fill_address": info.advertised_address,
            "num_adapters": len(self._adapters),
            "adapter_generation": self.adapter_generation,
        }


def _member(endpoint: Endpoint, info: worker_pb2.GetInfoResponse) -> WorkerView:
    return WorkerView(
        worker_id=info.worker_id,
        address=endpoint.address,
        epoch=info.epoch,
        host=endpoint.node or endpoint.address.rpartition(":")[0],
        total_pages=info.num_pages,
        page_size=info.page_size,
        model_digest=info.model_digest,
        kv_layout=_layout(info),
        encoder_digest=info.encoder_digest,
    )


def _layout(info: worker_pb2.GetInfoResponse) -> str:
    """Empty if not reported."""
    if not info.planes or not all(plane.parts for plane in info.planes):
        return ""
    planes = [
        PagedPlane(
            name=plane.name,
            layers=plane.layers,
            heads=plane.heads,
            dim=plane.parts[0].dim,
            dtype=plane.parts[0].dtype,
            parts=tuple(part.name for part in plane.parts),
            draft=plane.draft_digest.hex(),
        )
        for plane in info.planes
        if plane.heads
    ]
    layout = CacheLayout.of_planes(planes, info.page_size)
    of_blocks = [plane for plane in info.planes if not plane.heads]
    if not of_blocks:
        return layout.describe()
    parts, rows = (
        tuple(
            StatePart(part.name, (part.dim,), part.dtype) for plane in some for part in plane.parts
        )
        for some in (of_blocks[:1], of_blocks[1:])
    )
    name, layers = of_blocks[0].name, of_blocks[0].layers
    states = StatePlane(name=name, layers=layers, parts=parts, ring=(), rows=rows)
    return CacheLayout(info.page_size, layout.groups, states).describe()
