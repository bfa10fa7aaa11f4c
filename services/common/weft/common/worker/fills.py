"""Conversion of the fill contract between protobuf and plain values, validated on arrival."""

from __future__ import annotations

from weft.common.durations import duration
from weft.contract.errors import InvalidRequest
from weft.contract.handle import (
    ADAPTER_DIGEST_BYTES,
    LEASE_ID_BYTES,
    FillEvent,
    FillTimings,
    KvHandle,
    NixlTargetInfo,
)
from weft.contract.request import MAX_PRIORITY, MAX_TENANT_BYTES
from weft.contract.token_ids import TokenIds, extend_ids, unpacked_ids
from weft.v1 import common_pb2, kv_pb2

MAX_PAGES = 1 << 24
MAX_BLOCK_PAGES = 1 << 20
"""Most pages of a handle behind those of its tokens (`KvHandle.companion_pages`): a window of 2**18
positions in 63 layers beside one, in pages of 16 tokens, takes about as many.
"""
DECLINES = {
    "namespace": kv_pb2.DECLINE_REASON_NAMESPACE,
    "layout": kv_pb2.DECLINE_REASON_LAYOUT,
    "epoch": kv_pb2.DECLINE_REASON_EPOCH,
    "busy": kv_pb2.DECLINE_REASON_BUSY,
    "draining": kv_pb2.DECLINE_REASON_DRAINING,
    "too_long": kv_pb2.DECLINE_REASON_TOO_LONG,
    "transport": kv_pb2.DECLINE_REASON_TRANSPORT,
    "invalid": kv_pb2.DECLINE_REASON_INVALID,
    "not_held": kv_pb2.DECLINE_REASON_NOT_HELD,
}
TRANSPORTS = {
    "data": common_pb2.TRANSPORT_KIND_DATA,
    "nixl": common_pb2.TRANSPORT_KIND_NIXL,
}
LEASE_STATES = {
    "unknown": kv_pb2.LEASE_STATE_UNKNOWN,
    "active": kv_pb2.LEASE_STATE_ACTIVE,
    "stopping": kv_pb2.LEASE_STATE_STOPPING,
    "stopped": kv_pb2.LEASE_STATE_STOPPED,
    "fence_needed": kv_pb2.LEASE_STATE_FENCE_NEEDED,
}
LEASE_STATE_NAMES = {number: name for name, number in LEASE_STATES.items()}
LAST_EVENTS = frozenset({"declined", "stopped", "done", "failed"})
"""Kinds of events that end a fill; `broken` stands for a stream that ends."""
_DECLINE_NAMES = {number: name for name, number in DECLINES.items()}
_TRANSPORT_NAMES = {number: name for name, number in TRANSPORTS.items()}


def page_runs(pages: list[int]) -> list[kv_pb2.PageRun]:
    """Page numbers as runs of consecutive ones, in order."""
    runs: list[kv_pb2.PageRun] = []
    for page in pages:
        if runs and runs[-1].first_page + runs[-1].num_pages == page:
            runs[-1].num_pages += 1
        else:
            runs.append(kv_pb2.PageRun(first_page=page, num_pages=1))
    return runs


def start_to_proto(handle: KvHandle) -> kv_pb2.FillControl:
    """The message that starts a fill."""
    control = kv_pb2.FillControl()
    message = control.start.handle
    message.owner_id = handle.owner_id
    message.owner_epoch = handle.owner_epoch
    message.lease_id = handle.lease_id
    message.lease_duration.CopyFrom(duration(handle.lease_s))
    message.namespace = handle.namespace
    message.cache_salt = handle.cache_salt
    message.planes.append("target")
    message.page_size = handle.page_size
    message.token_words = handle.tokens.tobytes()
    message.start_token = handle.start_token
    message.end_token = handle.end_token
    message.page_runs.extend(page_runs(handle.pages))
    message.filler_epoch = handle.filler_epoch
    message.priority = handle.priority
    message.tenant = handle.tenant
    message.block_pages = handle.block_pages
    if handle.adapter:
        message.adapter.digest = handle.adapter
    target = handle.nixl
    if target is not None:
        message.nixl.CopyFrom(target_to_proto(target))
    return control


def handle_from_proto(message: kv_pb2.KvHandle) -> KvHandle:
    """Converts a handle from the wire. Sizes are limited here, the engine validates the rest.

    Raises:
        InvalidRequest: it is malformed beyond what can be declined.
    """
    if len(message.lease_id) != LEASE_ID_BYTES:
        raise InvalidRequest(f"lease_id has {len(message.lease_id)} bytes", param="lease_id")
    if list(message.planes) != ["target"]:
        raise InvalidRequest(f"planes {list(message.planes)}: only target", param="planes")
    tokens = _tokens_of(message)
    num_pages = sum(run.num_pages for run in message.page_runs)
    if num_pages > min(MAX_PAGES, len(tokens) + MAX_BLOCK_PAGES):
        raise InvalidRequest(f"{num_pages} pages", param="page_runs")
    if abs(message.priority) > MAX_PRIORITY:
        raise InvalidRequest(f"priority {message.priority}", param="priority")
    if len(message.tenant.encode()) > MAX_TENANT_BYTES:
        raise InvalidRequest(f"more than {MAX_TENANT_BYTES} bytes", param="tenant")
    if message.HasField("adapter") and len(message.adapter.digest) != ADAPTER_DIGEST_BYTES:
        raise InvalidRequest(f"a digest has {ADAPTER_DIGEST_BYTES} bytes", param="adapter")
    pages = [run.first_page + i for run in message.page_runs for i in range(run.num_pages)]
    return KvHandle(
        owner_id=message.owner_id,
        owner_epoch=message.owner_epoch,
        lease_id=message.lease_id,
        lease_s=message.lease_duration.ToNanoseconds() / 1e9,
        namespace=message.namespace,
        cache_salt=message.cache_salt,
        page_size=message.page_size,
        tokens=tokens,
        start_token=message.start_token,
        end_token=message.end_token,
        pages=pages,
        filler_epoch=message.filler_epoch,
        nixl=target_from_proto(message.nixl) if message.HasField("nixl") else None,
        priority=message.priority,
        tenant=message.tenant,
        adapter=message.adapter.digest,
        block_pages=message.block_pages,
    )


def _tokens_of(message: kv_pb2.KvHandle) -> TokenIds:
    """The tokens of a handle, in whichever of two forms it has them."""
    if message.token_words and message.tokens.ids:
        raise InvalidRequest("tokens and token_words are given", param="token_words")
    try:
        tokens = unpacked_ids(message.token_words)
    except ValueError as error:
        raise InvalidRequest(f"token_words: {error}", param="token_words") from error
    extend_ids(tokens, message.tokens.ids)
    return tokens


def target_to_proto(target: NixlTargetInfo) -> kv_pb2.NixlTarget:
    """Converts a NIXL target for the wire."""
    return kv_pb2.NixlTarget(
        version=target.version,
        agent_name=target.agent_name,
        agent_metadata=target.agent_metadata,
        agent_metadata_digest=target.agent_metadata_digest,
        base_address=target.base_address,
        page_bytes=target.page_bytes,
        num_pages=target.num_pages,
        device_id=target.device_id,
        memory_type=target.memory_type,
        max_notified_digests=target.max_notified_digests,
    )


def target_from_proto(message: kv_pb2.NixlTarget) -> NixlTargetInfo:
    """Converts a NIXL target from the wire; the transport checks it before use."""
    return NixlTargetInfo(
        version=message.version,
        agent_name=message.agent_name,
        agent_metadata=message.agent_metadata,
        agent_metadata_digest=message.agent_metadata_digest,
        base_address=message.base_address,
        page_bytes=message.page_bytes,
        num_pages=message.num_pages,
        device_id=message.device_id,
        memory_type=message.memory_type,
        max_notified_digests=message.max_notified_digests,
    )


def event_to_proto(event: FillEvent) -> kv_pb2.FillEvent:
    """Converts a filler's event for the wire."""
    out = kv_pb2.FillEvent()
    if event.kind == "accepted":
        out.accepted.start_token = event.start_token
        out.accepted.end_token = event.end_token
        out.accepted.planes.append("target")
        out.accepted.filler_epoch = event.filler_epoch
        out.accepted.transport = TRANSPORTS[event.transport]
        out.accepted.cached_tokens = event.cached_tokens
    elif event.kind == "declined":
        out.declined.reason = DECLINES[event.reason]
        out.declined.message = event.message
    elif event.kind == "written":
        out.written.chunk = event.chunk
        out.written.start_token = event.start_token
        out.written.end_token = event.end_token
        out.written.digests.extend(event.digests)
        if event.computed_tokens is not None:
            out.written.computed_tokens = event.computed_tokens
    elif event.kind == "data":
        out.data.chunk = event.chunk
        out.data.page_start_token = event.start_token
        out.data.plane = "target"
        out.data.offset = event.offset
        out.data.data = event.data
    elif event.kind == "stopped":
        out.stopped.SetInParent()
    elif event.kind == "done":
        assert event.timings is not None
        out.done.timings.CopyFrom(_timings_to_proto(event.timings))
    else:
        out.failed.error.code = "FILL_FAILED"
        out.failed.error.retryable = True
        out.failed.error.stage = "fill"
        out.failed.error.message = event.message
        out.failed.stopped = event.is_stopped
        out.failed.fence_needed = event.needs_fence
    return out


def event_from_proto(message: kv_pb2.FillEvent) -> FillEvent:
    """Converts a filler's event from the wire; an unknown one counts as a broken stream."""
    kind = message.WhichOneof("event")
    if kind == "accepted":
        accepted = message.accepted
        return FillEvent(
            kind="accepted",
            filler_epoch=accepted.filler_epoch,
            transport=_TRANSPORT_NAMES.get(accepted.transport, ""),
            cached_tokens=accepted.cached_tokens,
            start_token=accepted.start_token,
            end_token=accepted.end_token,
        )
    if kind == "declined":
        reason = _DECLINE_NAMES.get(message.declined.reason, "unspecified")
        return FillEvent(kind="declined", reason=reason, message=message.declined.message)
    if kind == "written":
        written = message.written
        has_count = written.HasField("computed_tokens")
        return FillEvent(
            kind="written",
            chunk=written.chunk,
            start_token=written.start_token,
            end_token=written.end_token,
            digests=list(written.digests),
            computed_tokens=written.computed_tokens if has_count else None,
        )
    if kind == "data":
        data = message.data
        return FillEvent(
            kind="data",
            chunk=data.chunk,
            start_token=data.page_start_token,
            offset=data.offset,
            data=data.data,
        )
    if kind == "stopped":
        return FillEvent(kind="stopped")
    if kind == "done":
        return FillEvent(kind="done", timings=_timings_from_proto(message.done.timings))
    if kind == "failed":
        failed = message.failed
        return FillEvent(
            kind="failed",
            message=failed.error.message,
            is_stopped=failed.stopped,
            needs_fence=failed.fence_needed,
        )
    return FillEvent(kind="broken", message="an event that this version does not know")


def _timings_to_proto(timings: FillTimings) -> kv_pb2.FillTimings:
    return kv_pb2.FillTimings(
        queued_time=duration(timings.queued_s),
        first_write_posted_time=duration(timings.first_write_posted_s),
        last_chunk_computed_time=duration(timings.last_chunk_computed_s),
        last_write_complete_time=duration(timings.last_write_complete_s),
        computed_tokens=timings.computed_tokens,
        bytes=timings.bytes,
    )


def _timings_from_proto(message: kv_pb2.FillTimings) -> FillTimings:
    return FillTimings(
        queued_s=message.queued_time.ToNanoseconds() / 1e9,
        first_write_posted_s=message.first_write_posted_time.ToNanoseconds() / 1e9,
        last_chunk_computed_s=message.last_chunk_computed_time.ToNanoseconds() / 1e9,
        last_write_complete_s=message.last_write_complete_time.ToNanoseconds() / 1e9,
        computed_tokens=message.computed_tokens,
        bytes=message.bytes,
    )
