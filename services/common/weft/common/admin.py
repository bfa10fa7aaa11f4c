"""The operators' port of a service: AdminService and further calls, behind a bearer token."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

import grpc
from grpc_reflection.v1alpha import reflection
from weft.common.faults import faults_to_proto
from weft.common.rpc.authorize import OPERATORS, RELAYED, AuthorizeInterceptor
from weft.common.rpc.errors import Context, abort
from weft.common.rpc.interceptors import ErrorInterceptor
from weft.common.rpc.listen import add_port, split_address
from weft.common.rpc.tls import Identity
from weft.common.settings import LogLevel, ServiceSettings
from weft.contract.codec.pairs import (
    EXPERT_STATE,
    FAULT,
    LOG_LEVELS,
    PAUSE_MODES,
    PROFILE_OPTIONS,
    SENT_TENSOR,
    WEIGHT_GROUP,
    WEIGHT_STATUS,
    WORKER_ROLES,
)
from weft.contract.errors import (
    ConfigError,
    InvalidRequest,
    ProfileNotFound,
    ProfilesDisabled,
    RoleFixed,
    Unauthenticated,
)
from weft.contract.experts import ExpertAction, ExpertState
from weft.contract.faults import BOARD, FaultSpec, FaultState
from weft.contract.profiles import ProfileOptions, check_id
from weft.contract.settings import RoleName
from weft.contract.weights import SLEEP_TAGS, WeightAction, WeightStatus
from weft.v1 import admin_pb2, admin_pb2_grpc, experts_pb2, profile_pb2, weights_pb2, worker_pb2

_log = logging.getLogger(__name__)

SERVICE_NAME = "weft.v1.AdminService"
MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 16, 1024
DEFAULT_ENTRIES, MAX_ENTRIES = 1000, 10_000
MAX_STATE_BYTES = 8 << 20
_MAX_REQUEST_BYTES = 16 << 20
_REFUSALS_LOGGED_EVERY_S = 1.0


class AdminBackend(Protocol):
    """The parts of AdminService that differ from service to service.

    The methods with a body are defaults for services that are one process.
    """

    async def flush_cache(self) -> int:
        """Drops cached pages that are not in use; returns how many."""
        ...

    async def dump_state(self, max_entries: int) -> Mapping[str, object]:
        """Current state of the service as JSON values: ids and numbers, no texts, no tokens. Each
        list has at most `max_entries` entries.
        """
        ...

    async def order_faults(
        self, *, add: FaultSpec | None = None, clear: str | None = None
    ) -> list[FaultState]:
        """Arms or disarms faults in the service's other processes; returns those armed there
        afterwards. `clear` is the point whose faults are disarmed; empty: all points; None: no
        point.
        """
        return []

    async def start_profile(self, profile: str, options: ProfileOptions) -> None:
        raise ProfilesDisabled("this service has no engine to profile", stage="profile")

    async def stop_profile(self, profile: str) -> None:
        raise ProfileNotFound(f"there is no profile {profile!r}", stage="profile")

    async def read_profile(
        self, profile: str
    ) -> tuple[profile_pb2.ProfileSummary, AsyncIterator[bytes]]:
        """Waits until a profile's trace is written; returns what it has, and its bytes."""
        raise ProfileNotFound(f"there is no profile {profile!r}", stage="profile")

    async def command_weights(self, action: WeightAction, **options: Any) -> WeightStatus:
        """Orders what concerns weights and pauses, with the fields of `WeightCommand`; returns the
        state afterwards.
        """
        raise ConfigError("this service has no model; only workers have", stage="weights")

    async def command_experts(self, action: ExpertAction) -> ExpertState:
        """Orders what concerns the experts of the model; returns the state afterwards."""
        raise ConfigError("this service has no model; only workers have", stage="experts")

    async def copy_weights(self, address: str, version: str) -> WeightStatus:
        """Changes the weights to those of the worker at host:port; returns the state afterwards.
        Empty `version`: it has the same name as there.
        """
        raise ConfigError("this service has no model; only workers have", stage="weights")

    def set_role(
        self, role: RoleName, lease_s: float | None
    ) -> tuple[RoleName, worker_pb2.RoleState]:
        """Sets what gateways use a worker for; returns the role before, and the state."""
        raise RoleFixed("this service is no worker; only workers have roles", stage="role")

    def set_log_level(self, level: LogLevel) -> None:
        """Sets the log level of the service's other processes; this process has it already."""
        return None


class AdminServer:
    """A separate gRPC server for one service's operators."""

    def __init__(
        self, settings: ServiceSettings, backend: AdminBackend, identity: Identity | None = None
    ) -> None:
        """Reads the token; nothing listens yet. `settings.admin_port` must not be None.

        Raises:
            ConfigError: There is no usable token.
        """
        self._settings = settings
        if settings.enable_faults:
            BOARD.enable()
        assert settings.admin_token_file is not None, "checked with the settings"
        token = read_token(settings.admin_token_file)
        self._identity = identity
        authorize = () if identity is None else (AuthorizeInterceptor(OPERATORS, RELAYED),)
        self.grpc = grpc.aio.server(
            interceptors=(*authorize, TokenInterceptor(token), ErrorInterceptor()),
            options=(
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", _MAX_REQUEST_BYTES),
            ),
        )
        """The gRPC server; add further services for operators before `start`."""
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(backend), self.grpc)
        reflection.enable_server_reflection((SERVICE_NAME, reflection.SERVICE_NAME), self.grpc)
        self.address = ""
        """Address host:port, once started."""

    async def start(self) -> None:
        """Binds the port and starts serving.

        Raises:
            ConfigError: The port is taken or the address cannot be bound.
        """
        settings = self._settings
        assert settings.admin_port is not None
        flags = ("--admin-port", "--admin-host")
        identity = self._identity
        credentials = None if identity is None else identity.server_credentials(True)
        self.address = add_port(
            self.grpc, settings.admin_host, settings.admin_port, flags, credentials
        )
        await self.grpc.start()

    async def stop(self) -> None:
        """Ends the calls in progress."""
        await self.grpc.stop(None)


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    def __init__(self, backend: AdminBackend) -> None:
        self._backend = backend

    async def FlushCache(
        self, request: admin_pb2.FlushCacheRequest, context: Context
    ) -> admin_pb2.FlushCacheResponse:
        flushed = await self._backend.flush_cache()
        _log.info("cache flushed", extra={"pages": flushed})
        return admin_pb2.FlushCacheResponse(flushed_pages=flushed)

    async def DumpState(
        self, request: admin_pb2.DumpStateRequest, context: Context
    ) -> admin_pb2.DumpStateResponse:
        max_entries = request.max_entries if request.HasField("max_entries") else DEFAULT_ENTRIES
        if not 1 <= max_entries <= MAX_ENTRIES:
            message = f"max_entries is {max_entries}; give 1 to {MAX_ENTRIES:,}"
            raise InvalidRequest(message, stage="validate", param="max_entries")
        state = json.dumps(await self._backend.dump_state(max_entries))
        if len(state) > MAX_STATE_BYTES:
            message = f"the state has {len(state):,} bytes; ask for fewer max_entries"
            raise InvalidRequest(message, stage="admin", param="max_entries")
        return admin_pb2.DumpStateResponse(state=state)

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        check_id(request.profile_id, "profile_id")
        options = PROFILE_OPTIONS.decode(request.options)
        await self._backend.start_profile(request.profile_id, options)
        return admin_pb2.StartProfileResponse()

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        await self._backend.stop_profile(request.profile_id)
        return admin_pb2.StopProfileResponse()

    async def ReadProfile(
        self, request: admin_pb2.ReadProfileRequest, context: Context
    ) -> AsyncIterator[admin_pb2.ReadProfileResponse]:
        summary, chunks = await self._backend.read_profile(request.profile_id)
        yield admin_pb2.ReadProfileResponse(summary=summary)
        async for chunk in chunks:
            yield admin_pb2.ReadProfileResponse(data=chunk)

    async def StartExpertCounts(
        self, request: experts_pb2.StartExpertCountsRequest, context: Context
    ) -> experts_pb2.StartExpertCountsResponse:
        state = await self._backend.command_experts("start")
        return experts_pb2.StartExpertCountsResponse(state=EXPERT_STATE.encode(state))

    async def StopExpertCounts(
        self, request: experts_pb2.StopExpertCountsRequest, context: Context
    ) -> experts_pb2.StopExpertCountsResponse:
        state = await self._backend.command_experts("stop")
        return experts_pb2.StopExpertCountsResponse(state=EXPERT_STATE.encode(state))

    async def ReadExpertCounts(
        self, request: experts_pb2.ReadExpertCountsRequest, context: Context
    ) -> experts_pb2.ReadExpertCountsResponse:
        state = await self._backend.command_experts("dump")
        return experts_pb2.ReadExpertCountsResponse(state=EXPERT_STATE.encode(state))

    async def BalanceExperts(
        self, request: experts_pb2.BalanceExpertsRequest, context: Context
    ) -> experts_pb2.BalanceExpertsResponse:
        state = await self._backend.command_experts("balance")
        _log.info("experts balanced")
        return experts_pb2.BalanceExpertsResponse(state=EXPERT_STATE.encode(state))

    async def Pause(
        self, request: weights_pb2.PauseRequest, context: Context
    ) -> weights_pb2.PauseResponse:
        options: dict[str, Any] = {}
        if request.HasField("limit"):
            options["limit_s"] = request.limit.ToNanoseconds() / 1e9
        mode = PAUSE_MODES[request.mode] or "keep"
        status = await self._backend.command_weights("pause", mode=mode, **options)
        _log.info("paused", extra={"mode": mode})
        return weights_pb2.PauseResponse(status=WEIGHT_STATUS.encode(status))

    async def Resume(
        self, request: weights_pb2.ResumeRequest, context: Context
    ) -> weights_pb2.ResumeResponse:
        status = await self._backend.command_weights("resume")
        _log.info("resumed")
        return weights_pb2.ResumeResponse(status=WEIGHT_STATUS.encode(status))

    async def Refit(
        self, request: weights_pb2.RefitRequest, context: Context
    ) -> weights_pb2.RefitResponse:
        if request.peer and request.folder:
            raise InvalidRequest("peer: give a folder or a peer", stage="validate", param="peer")
        if request.peer:
            try:
                split_address(request.peer)
            except ValueError as error:
                raise InvalidRequest(f"peer: {error}", stage="validate", param="peer") from error
            status = await self._backend.copy_weights(request.peer, request.version)
        else:
            status = await self._backend.command_weights(
                "refit", folder=request.folder, version=request.version
            )
        _log.info("weights changed", extra={"version": status.version})
        return weights_pb2.RefitResponse(status=WEIGHT_STATUS.encode(status))

    async def JoinWeightGroup(
        self, request: weights_pb2.JoinWeightGroupRequest, context: Context
    ) -> weights_pb2.JoinWeightGroupResponse:
        group = WEIGHT_GROUP.decode(request.group)
        status = await self._backend.command_weights("join", group=group)
        _log.info("joined a trainer's group", extra={"group": group.name})
        return weights_pb2.JoinWeightGroupResponse(status=WEIGHT_STATUS.encode(status))

    async def LeaveWeightGroup(
        self, request: weights_pb2.LeaveWeightGroupRequest, context: Context
    ) -> weights_pb2.LeaveWeightGroupResponse:
        status = await self._backend.command_weights("leave", group_name=request.name)
        return weights_pb2.LeaveWeightGroupResponse(status=WEIGHT_STATUS.encode(status))

    async def BeginRefit(
        self, request: weights_pb2.BeginRefitRequest, context: Context
    ) -> weights_pb2.BeginRefitResponse:
        status = await self._backend.command_weights("begin")
        return weights_pb2.BeginRefitResponse(status=WEIGHT_STATUS.encode(status))

    async def ReceiveWeights(
        self, request: weights_pb2.ReceiveWeightsRequest, context: Context
    ) -> weights_pb2.ReceiveWeightsResponse:
        status = await self._backend.command_weights(
            "receive",
            group_name=request.group_name,
            tensors=[SENT_TENSOR.decode(one) for one in request.tensors],
            packed_bytes=request.packed_bytes if request.HasField("packed_bytes") else None,
            version=request.version,
        )
        return weights_pb2.ReceiveWeightsResponse(status=WEIGHT_STATUS.encode(status))

    async def EndRefit(
        self, request: weights_pb2.EndRefitRequest, context: Context
    ) -> weights_pb2.EndRefitResponse:
        status = await self._backend.command_weights("end", version=request.version)
        _log.info("weights changed", extra={"version": status.version})
        return weights_pb2.EndRefitResponse(status=WEIGHT_STATUS.encode(status))

    async def Sleep(
        self, request: weights_pb2.SleepRequest, context: Context
    ) -> weights_pb2.SleepResponse:
        status = await self._backend.command_weights(
            "sleep",
            level=request.level or 1,
            mode=PAUSE_MODES[request.mode] or "abort",
            tags=list(request.tags) or list(SLEEP_TAGS),
        )
        _log.info("asleep", extra={"level": request.level or 1, "tags": status.asleep})
        return weights_pb2.SleepResponse(status=WEIGHT_STATUS.encode(status))

    async def Wake(
        self, request: weights_pb2.WakeRequest, context: Context
    ) -> weights_pb2.WakeResponse:
        tags = list(request.tags) or list(SLEEP_TAGS)
        status = await self._backend.command_weights("wake", tags=tags)
        _log.info("awake", extra={"asleep": status.asleep})
        return weights_pb2.WakeResponse(status=WEIGHT_STATUS.encode(status))

    async def ShowWeights(
        self, request: weights_pb2.ShowWeightsRequest, context: Context
    ) -> weights_pb2.ShowWeightsResponse:
        action: WeightAction = "digest" if request.packed_digest else "show"
        status = await self._backend.command_weights(action)
        return weights_pb2.ShowWeightsResponse(status=WEIGHT_STATUS.encode(status))

    async def SetRole(
        self, request: admin_pb2.SetRoleRequest, context: Context
    ) -> admin_pb2.SetRoleResponse:
        role = cast(RoleName, WORKER_ROLES[request.role])
        if not role:
            raise InvalidRequest("role: give one of WorkerRole", stage="validate", param="role")
        lease_s = request.lease.ToNanoseconds() / 1e9 if request.HasField("lease") else None
        previous, state = self._backend.set_role(role, lease_s)
        if role != previous:
            _log.info("role set", extra={"role": role, "previous": previous, "lease_s": lease_s})
        return admin_pb2.SetRoleResponse(previous_role=WORKER_ROLES.numbers[previous], state=state)

    async def InjectFault(
        self, request: admin_pb2.InjectFaultRequest, context: Context
    ) -> admin_pb2.InjectFaultResponse:
        BOARD.check_enabled()
        spec = FAULT.decode(request.fault)
        # Every process arms the fault; the one that has the point in its code will pass it.
        BOARD.arm(spec)
        await self._backend.order_faults(add=spec)
        _log.warning("fault armed", extra={"point": spec.point, "kind": spec.kind})
        return admin_pb2.InjectFaultResponse()

    async def ListFaults(
        self, request: admin_pb2.ListFaultsRequest, context: Context
    ) -> admin_pb2.ListFaultsResponse:
        BOARD.check_enabled()
        return faults_to_proto(BOARD.states(), await self._backend.order_faults())

    async def ClearFaults(
        self, request: admin_pb2.ClearFaultsRequest, context: Context
    ) -> admin_pb2.ClearFaultsResponse:
        BOARD.check_enabled()
        cleared = BOARD.clear(request.point)
        await self._backend.order_faults(clear=request.point)
        _log.warning("faults cleared", extra={"faults": cleared})
        return admin_pb2.ClearFaultsResponse(cleared_faults=cleared)

    async def SetLogLevel(
        self, request: admin_pb2.SetLogLevelRequest, context: Context
    ) -> admin_pb2.SetLogLevelResponse:
        level = cast(LogLevel, LOG_LEVELS[request.level])
        if not level:
            raise InvalidRequest("level: give one of LogLevel", stage="validate", param="level")
        root = logging.getLogger()
        previous = LOG_LEVELS.numbers.get(logging.getLevelName(root.level).lower(), 0)
        root.setLevel(level.upper())
        self._backend.set_log_level(level)
        _log.info("log level set", extra={"log_level": level})
        return admin_pb2.SetLogLevelResponse(previous_level=previous)


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Accepts calls whose `authorization` is `Bearer TOKEN`; refuses all others, unknown methods
    included.

    Nothing that a caller sent is logged.
    """

    def __init__(self, token: str) -> None:
        self._expected = token_digest(f"Bearer {token}")
        self._log_at = 0.0

    async def intercept_service(
        self, continuation: Any, handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        given = ""
        for key, value in handler_call_details.invocation_metadata or ():
            if key == "authorization" and isinstance(value, str):
                given = value
        # Digests are compared, so that the time reveals neither content nor length.
        if hmac.compare_digest(token_digest(given), self._expected):
            return await continuation(handler_call_details)
        now = time.monotonic()
        if now >= self._log_at:
            self._log_at = now + _REFUSALS_LOGGED_EVERY_S
            _log.warning("a call to the admin port had no valid token")
        return grpc.stream_stream_rpc_method_handler(_refuse)


async def _refuse(requests: Any, context: Context) -> None:
    await abort(
        context,
        Unauthenticated(
            "the admin port needs the metadata `authorization: Bearer TOKEN` with the token of "
            "--admin-token-file",
            stage="admin",
        ),
    )


def read_token(path: Path) -> str:
    """Reads a token from a file, stripping whitespace.

    Raises:
        ConfigError: The file cannot be read or holds no usable token; says nothing of its content.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise ConfigError(f"--admin-token-file {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--admin-token-file {path}: not plain ASCII text") from None
    if not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS or not token.isprintable():
        raise ConfigError(
            f"--admin-token-file {path}: a token is one line of {MIN_TOKEN_CHARS} to "
            f"{MAX_TOKEN_CHARS} printable characters"
        )
    return token


def token_digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()
