"""Typed errors. Services turn them into statuses; no other exceptions cross a public interface."""

from __future__ import annotations


class WeftError(Exception):
    """An error that says what failed, where, and whether a retry can help.

    Subclasses fix the reason and the codes; callers give the message and further facts.
    """

    reason: str = "INTERNAL"
    """Error code, UPPER_SNAKE; stable, part of the API."""
    grpc_code: str = "INTERNAL"
    """Name of the google.rpc.Code."""
    http_status: int = 500
    retryable: bool = False
    is_of_worker: bool = False
    """Whether it is about one worker, where another one may serve the request."""

    def __init__(
        self,
        message: str,
        *,
        stage: str = "",
        param: str | None = None,
        worker_id: str = "",
        attempt: int = 0,
        retry_after_s: float | None = None,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.stage = stage
        self.param = param
        self.worker_id = worker_id
        self.attempt = attempt
        self.retry_after_s = retry_after_s
        self.metadata = metadata
        """Further facts for the caller: keys in lower case, and values."""

    def blame(self, param: str) -> None:
        """Sets the field at fault, by the client's name for it, and adds it to the message."""
        self.param = param
        self.message = f"{param}: {self.message}"


class InvalidRequest(WeftError):
    """The request can never succeed as it is; `param` names the field at fault."""

    reason = "INVALID_REQUEST"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class ContextTooLong(InvalidRequest):
    """Prompt plus minimal output exceed the context length or the KV pool."""

    reason = "CONTEXT_LENGTH_EXCEEDED"
    num_prompt_tokens = 0
    """Tokens of a prompt that is too long by itself, or a lower bound of them; 0: not known."""
    max_tokens = 0
    """The context length, if the prompt's tokens are known."""


class MediaMissing(WeftError):
    """The worker lacks the content of a medium in the prompt; whoever has it brings it again."""

    reason = "MEDIA_MISSING"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503
    retryable = True
    is_of_worker = True


class Unauthenticated(WeftError):
    """The call has no credentials, or wrong ones."""

    reason = "UNAUTHENTICATED"
    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class InvalidApiKey(Unauthenticated):
    """The call has no API key, or an unknown one."""

    reason = "INVALID_API_KEY"


class PermissionDenied(WeftError):
    """The caller is known but not allowed to do this."""

    reason = "PERMISSION_DENIED"
    grpc_code = "PERMISSION_DENIED"
    http_status = 403


class ModelNotFound(WeftError):
    """The named model is not served here."""

    reason = "MODEL_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class RequestNotFound(WeftError):
    """The caller has no running request of this id."""

    reason = "REQUEST_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class WorkerNotFound(WeftError):
    """The mesh has no worker of this id."""

    reason = "WORKER_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class ProfileRunning(WeftError):
    """Something is being profiled already; only one profile runs at a time."""

    reason = "PROFILE_RUNNING"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class ProfileNotFound(WeftError):
    """There is no profile of this id, or it is no longer kept."""

    reason = "PROFILE_NOT_FOUND"
    grpc_code = "NOT_FOUND"
    http_status = 404


class ProfilesDisabled(WeftError):
    """The service has no folder for profiles, or runs no steps."""

    reason = "PROFILES_DISABLED"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class RoleFixed(WeftError):
    """The worker's role cannot change: it serves only one, or the mesh would lose its last decode
    worker.
    """

    reason = "ROLE_FIXED"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class Paused(WeftError):
    """The worker takes no requests, since a trainer has paused it or changes its weights."""

    reason = "PAUSED"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True
    is_of_worker = True


class Asleep(WeftError):
    """The worker has given its memory back, and takes no requests until it is woken."""

    reason = "ASLEEP"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True
    is_of_worker = True


class WeightsIncomplete(WeftError):
    """An update of the weights has failed, so that the worker has no version to serve."""

    reason = "WEIGHTS_INCOMPLETE"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 503
    is_of_worker = True


class RefitRunning(WeftError):
    """The weights are being changed already."""

    reason = "REFIT_RUNNING"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class ExpertsFixed(WeftError):
    """The worker does not count its experts, or does not move them."""

    reason = "EXPERTS_FIXED"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class GroupFailed(WeftError):
    """A trainer's process group did not form, or a broadcast in it did not end: the trainer is gone
    or late, or sends something else than it said.
    """

    reason = "GROUP_FAILED"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409


class AdapterNotFound(ModelNotFound):
    """The worker was never ordered to load this adapter, or was ordered to unload it."""

    reason = "ADAPTER_NOT_FOUND"
    is_of_worker = True


class AdapterError(WeftError):
    """An adapter cannot be used; the message names its directory, and the tensor or the sizes."""

    reason = "ADAPTER_INVALID"
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class Overloaded(WeftError):
    """A bounded queue is full; try again after `retry_after_s`."""

    reason = "OVERLOADED"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class RateLimited(WeftError):
    """The caller, or all callers together, have used up their rate."""

    reason = "RATE_LIMIT_EXCEEDED"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    retryable = True


class TargetUnattainable(Overloaded):
    """With the present load the request would miss its latency target."""

    reason = "TARGET_UNATTAINABLE"


class SlowClient(WeftError):
    """The client reads more slowly than its stream is produced, and its buffer is full."""

    reason = "SLOW_CLIENT"
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429


class PeerUnavailable(WeftError):
    """A worker that the request needs is unavailable."""

    reason = "PEER_UNAVAILABLE"
    grpc_code = "UNAVAILABLE"
    http_status = 503
    retryable = True


class Draining(PeerUnavailable):
    """The worker takes no new work: it is shutting down, or an operator drains it."""

    reason = "DRAINING"


class Starting(PeerUnavailable):
    """The worker loads its model and takes no work yet."""

    reason = "STARTING"


class DeadlineExceeded(WeftError):
    """The request's deadline has passed."""

    reason = "DEADLINE_EXCEEDED"
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    retryable = True


class Cancelled(WeftError):
    """The client cancelled the request or disconnected."""

    reason = "CANCELLED"
    grpc_code = "CANCELLED"
    http_status = 499


class Internal(WeftError):
    """An internal error: a defect in Weft itself."""


class ModelError(WeftError):
    """A model directory cannot be used; the message names the file or tensor."""

    reason = "MODEL_INVALID"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 400


class ConfigError(WeftError):
    """Settings are inconsistent or do not suit this machine."""

    reason = "CONFIG_INVALID"
    grpc_code = "FAILED_PRECONDITION"
    http_status = 400


class FaultsDisabled(ConfigError):
    """Faults cannot be injected into a service that was not started with fault injection."""

    reason = "FAULTS_DISABLED"


class InjectedFault(Internal):
    """An error requested through fault injection (`weft.contract.faults`), not a defect."""

    reason = "INJECTED_FAULT"


_BY_REASON: dict[str, type[WeftError]] = {
    cls.reason: cls
    for cls in (
        InvalidRequest,
        ContextTooLong,
        MediaMissing,
        Unauthenticated,
        InvalidApiKey,
        PermissionDenied,
        ModelNotFound,
        RequestNotFound,
        WorkerNotFound,
        ProfileRunning,
        ProfileNotFound,
        ProfilesDisabled,
        Paused,
        Asleep,
        WeightsIncomplete,
        RefitRunning,
        ExpertsFixed,
        GroupFailed,
        AdapterNotFound,
        AdapterError,
        Overloaded,
        TargetUnattainable,
        RateLimited,
        SlowClient,
        PeerUnavailable,
        Draining,
        Starting,
        DeadlineExceeded,
        Cancelled,
        Internal,
        ModelError,
        ConfigError,
        FaultsDisabled,
        InjectedFault,
    )
}


def error_class(reason: str) -> type[WeftError]:
    """Error class of a reason received over the wire; `Internal` for unknown ones."""
    return _BY_REASON.get(reason, Internal)


class RanksLost(BaseException):
    """A rank of this engine is gone, late or has failed, so this process cannot continue.

    It is not an `Exception`: handlers of failed steps and requests must not catch it. The process
    ends, and all other ranks with it.
    """
