"""The declared types and the messages that they travel in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.contract.adapters import AdapterState
from weft.contract.codec.walk import Codec, enum_names
from weft.contract.errors import InvalidRequest
from weft.contract.experts import ExpertBalance, ExpertState
from weft.contract.faults import FaultSpec
from weft.contract.fills import FillStart
from weft.contract.handle import EventKind, FillEvent, FillTimings, KvHandle, NixlTargetInfo
from weft.contract.kv_changes import KvChange, KvRun
from weft.contract.profiles import ProfileEnd, ProfileOptions
from weft.contract.reports import EngineInfo, LoadReport, TierReport
from weft.contract.request import (
    BeamParams,
    Constraint,
    SamplingParams,
    StopCriteria,
    TimeTokens,
)
from weft.contract.spans import MediaSpan
from weft.contract.store import PutOrder, StoreHeld, StoreHold, StoreLookup
from weft.contract.submits import (
    Accepted,
    Cancel,
    Finished,
    Preempted,
    SessionEnd,
    Submit,
)
from weft.contract.tasks import PoolingParams
from weft.contract.timeline import FillCandidate, FillRecord, Timeline
from weft.contract.token_ids import TokenIds, extend_ids, unpacked_ids
from weft.contract.weights import SentTensor, WeightGroup, WeightOffer, WeightStatus
from weft.v1 import (
    admin_pb2,
    common_pb2,
    decode_pb2,
    experts_pb2,
    kv_pb2,
    kvstore_pb2,
    mesh_pb2,
    profile_pb2,
    weights_pb2,
    worker_pb2,
)

MAX_PAGES = 1 << 24
MAX_BLOCK_PAGES = 1 << 20
"""Most pages of a handle after those of its tokens (`KvHandle.companion_pages`): a window of 2**18
positions in 63 layers next to one other layer, in pages of 16 tokens, takes about as many.
"""
_PLANES = ["target"]

FAULT_KINDS = enum_names(admin_pb2.FaultKind.DESCRIPTOR)
FILL_SOURCES = enum_names(common_pb2.FillSource.DESCRIPTOR)
FINISH_REASONS = enum_names(common_pb2.FinishReason.DESCRIPTOR)
PAUSE_MODES = enum_names(weights_pb2.PauseMode.DESCRIPTOR)
LOG_LEVELS = enum_names(admin_pb2.LogLevel.DESCRIPTOR)
LEASE_STATES = enum_names(kv_pb2.LeaseState.DESCRIPTOR)
TRANSPORTS = enum_names(common_pb2.TransportKind.DESCRIPTOR)
ADAPTER_STATES = enum_names(worker_pb2.AdapterState.DESCRIPTOR)
WORKER_ROLES = enum_names(worker_pb2.WorkerRole.DESCRIPTOR)
FLOW_KINDS = enum_names(mesh_pb2.FlowKind.DESCRIPTOR)
MEMBER_ROLES = enum_names(mesh_pb2.MemberRole.DESCRIPTOR)

# -- requests --------------------------------------------------------------------------------------


def _constraint_plain(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "choice":
        return {"choice": {"choices": constraint.choices}}
    return {constraint.kind: constraint.text}


def _constraint_values(message: common_pb2.Constraint) -> dict[str, Any]:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("no kind of constraint is set", param="constraint")
    if kind == "choice":
        return {"kind": kind, "choices": tuple(message.choice.choices), "whitespace": None}
    return {"kind": kind, "text": getattr(message, kind)}


CONSTRAINT = Codec(
    Constraint,
    common_pb2.Constraint,
    apart=(
        *("kind", "text", "choices"),
        *(one.name for one in common_pb2.Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields),
    ),
    more_plain=_constraint_plain,
    more_values=_constraint_values,
)
TIME_TOKENS = Codec(TimeTokens, common_pb2.TimeTokens)
BEAMS = Codec(BeamParams, common_pb2.BeamSearch)
SAMPLING = Codec(SamplingParams, common_pb2.SamplingParams)
STOP = Codec(
    StopCriteria,
    common_pb2.StopCriteria,
    # Only the gateway uses these.
    apart=("stop", "stop_regex", "include_stop_in_output"),
)
POOL = Codec(PoolingParams, decode_pb2.PoolOptions, apart=("pooling", "is_whole"))
CANDIDATE = Codec(FillCandidate, decode_pb2.PrefillCandidate, apart=("first_token", "kind"))
SPAN = Codec(MediaSpan, common_pb2.MediaSpan)
SUBMIT = Codec(
    Submit,
    decode_pb2.Submit,
    # Tokens may come in parts, and streams are the Session's own.
    apart=("gateway", "model", "prompt", "prompt_length", "progress", "stream"),
)
CANCEL = Codec(Cancel, decode_pb2.Cancel, apart=("gateway",))
SESSION_END = Codec(SessionEnd, decode_pb2.EndSession)

# -- answers ---------------------------------------------------------------------------------------

FILL_RECORD = Codec(
    FillRecord,
    common_pb2.FillTimeline,
    apart=("announced_s", "arrived_s", "checked_s", "lease_id"),
)
TIMELINE = Codec(
    Timeline,
    common_pb2.Timeline,
    apart=("submitted_at", "local_prefill_began_s", "worker_id", "lost_attempts"),
)
ACCEPTED = Codec(Accepted, decode_pb2.SessionEvent.Accepted)
PREEMPTED = Codec(Preempted, decode_pb2.SessionEvent.Preempted)
FINISHED = Codec(Finished, decode_pb2.SessionEvent.Finished)

# -- fills -----------------------------------------------------------------------------------------


def page_runs(pages: Sequence[int]) -> list[dict[str, int]]:
    """Page numbers as runs of consecutive numbers, in order."""
    runs: list[dict[str, int]] = []
    end = -1
    for page in pages:
        if page == end:
            runs[-1]["num_pages"] += 1
        else:
            runs.append({"first_page": page, "num_pages": 1})
        end = page + 1
    return runs


def _handle_plain(handle: KvHandle) -> dict[str, Any]:
    return {
        "planes": _PLANES,
        "token_words": handle.tokens.tobytes(),
        "page_runs": page_runs(handle.pages),
    }


def _handle_values(message: kv_pb2.KvHandle) -> dict[str, Any]:
    if list(message.planes) != _PLANES:
        raise InvalidRequest(f"planes {list(message.planes)}: only target", param="planes")
    tokens = _tokens_of(message)
    num_pages = sum(run.num_pages for run in message.page_runs)
    if num_pages > min(MAX_PAGES, len(tokens) + MAX_BLOCK_PAGES):
        raise InvalidRequest(f"{num_pages} pages", param="page_runs")
    pages = [run.first_page + i for run in message.page_runs for i in range(run.num_pages)]
    return {"tokens": tokens, "pages": pages}


def _tokens_of(message: kv_pb2.KvHandle) -> TokenIds:
    """A handle has its tokens in one of two forms."""
    if message.token_words and message.tokens.ids:
        raise InvalidRequest("tokens and token_words are given", param="token_words")
    try:
        tokens = unpacked_ids(message.token_words)
    except ValueError as error:
        raise InvalidRequest(f"token_words: {error}", param="token_words") from error
    extend_ids(tokens, message.tokens.ids)
    return tokens


TARGET = Codec(NixlTargetInfo, kv_pb2.NixlTarget)
HANDLE = Codec(
    KvHandle,
    kv_pb2.KvHandle,
    apart=("planes", "tokens", "token_words", "pages", "page_runs"),
    more_plain=_handle_plain,
    more_values=_handle_values,
)
FILL_START = Codec(FillStart, kv_pb2.FillControl.Start, apart=("stream",))
TIMINGS = Codec(
    FillTimings,
    kv_pb2.FillTimings,
    apart=(
        *("accepted_at", "planned_s", "last_digested_s", "last_digest_s"),
        *("last_write_posted_s", "reported_s"),
    ),
)


def _failed_plain(event: FillEvent) -> dict[str, Any]:
    detail = {"code": "FILL_FAILED", "retryable": True, "stage": "fill", "message": event.message}
    return {"error": detail}


_EVENTS: dict[EventKind, Codec[FillEvent, Any]] = {
    "accepted": Codec(
        FillEvent,
        kv_pb2.FillEvent.Accepted,
        is_part=True,
        apart=("planes",),
        more_plain=lambda event: {"planes": _PLANES},
    ),
    "declined": Codec(FillEvent, kv_pb2.FillEvent.Declined, is_part=True, apart=("retry_after",)),
    "written": Codec(FillEvent, kv_pb2.FillEvent.Written, is_part=True),
    "data": Codec(
        FillEvent,
        kv_pb2.FillEvent.Data,
        is_part=True,
        apart=("plane", "page_start_token"),
        more_plain=lambda event: {"plane": _PLANES[0], "page_start_token": event.start_token},
        more_values=lambda message: {"start_token": message.page_start_token},
    ),
    "stopped": Codec(FillEvent, kv_pb2.FillEvent.Stopped, is_part=True),
    "done": Codec(
        FillEvent,
        kv_pb2.FillEvent.Done,
        is_part=True,
        # Times that a filler does not send are 0.
        more_values=lambda message: {"timings": TIMINGS.decode(message.timings)},
    ),
    "failed": Codec(
        FillEvent,
        kv_pb2.FillEvent.Failed,
        is_part=True,
        apart=("error",),
        more_plain=_failed_plain,
        more_values=lambda message: {"message": message.error.message},
    ),
}


def event_to_proto(event: FillEvent) -> kv_pb2.FillEvent:
    fields: dict[str, Any] = {event.kind: _EVENTS[event.kind].plain(event)}
    return kv_pb2.FillEvent(**fields)


def event_from_proto(message: kv_pb2.FillEvent) -> FillEvent:
    """An event of an unknown kind counts as a broken stream."""
    kind = message.WhichOneof("event")
    if kind is None:
        return FillEvent(kind="broken", message="an event that this version does not know")
    return _EVENTS[kind].decode(getattr(message, kind), kind=kind)


# -- the KV store ----------------------------------------------------------------------------------

LOOKUP = Codec(
    StoreLookup, kvstore_pb2.LookupRequest, apart=("lookup", "request_id", "traceparent")
)
PUT = Codec(PutOrder, kvstore_pb2.PutRequest)
HOLD = Codec(StoreHold, kvstore_pb2.HoldRequest, apart=("hold", "address"))
HELD = Codec(StoreHeld, kvstore_pb2.HoldResponse, apart=("hold",))

# -- workers ---------------------------------------------------------------------------------------

TIER = Codec(TierReport, kv_pb2.TierState)
KV_RUN = Codec(KvRun, worker_pb2.KvRun)
KV_CHANGE = Codec(KvChange, worker_pb2.KvChange)
ADAPTER = Codec(AdapterState, worker_pb2.AdapterStatus)
FAULT = Codec(FaultSpec, admin_pb2.Fault)
WEIGHT_STATUS = Codec(WeightStatus, weights_pb2.WeightStatus)
WEIGHT_GROUP = Codec(WeightGroup, weights_pb2.WeightGroup)
WEIGHT_OFFER = Codec(WeightOffer, weights_pb2.OfferWeightsResponse)
SENT_TENSOR = Codec(SentTensor, weights_pb2.SentTensor)
EXPERT_BALANCE = Codec(ExpertBalance, experts_pb2.ExpertBalance)
EXPERT_STATE = Codec(ExpertState, experts_pb2.ExpertState)
PROFILE_OPTIONS = Codec(ProfileOptions, profile_pb2.ProfileOptions)
PROFILED_ENGINE = Codec(
    ProfileEnd,
    profile_pb2.ProfiledEngine,
    apart=("profile", "began_s", "ended_s", "worker_id"),
)
LOAD = Codec(
    LoadReport,
    worker_pb2.WatchLoadResponse,
    apart=(
        # Only the engine has these.
        *("quarantine_over_s", "staging", "new_token_ratio", "is_idle", "transport_detail"),
        *("window_pages", "draft_depths"),
        # In another form, or known to the server alone.
        *("state_counts", "state_blocks", "decode_step_s", "decode_step", "decode_step_requests"),
        *("adapters", "gone_adapters", "adapter_generation", "adapters_are_changes"),
        *("worker_id", "epoch", "loop_age", "model_digest", "role"),
    ),
)
INFO = Codec(
    EngineInfo,
    worker_pb2.GetInfoResponse,
    apart=(
        # In another form.
        *("layers", "kv_heads", "head_dim", "kv_parts", "draft", "states", "further_planes"),
        *("page_bytes", "planes", "max_loras", "max_lora_rank", "adapters"),
        # For the server alone.
        *("incoming", "outgoing"),
        # Only the server has these.
        *("worker_id", "role", "model", "server_pid", "kvstores", "advertised_address"),
        *("admin_port", "host", "ranks", "start_seconds"),
    ),
)
