"""Messages between an engine and the server process in front of it.

Plain dataclasses: the engine knows no wire format, the server encodes them (msgpack) for the local
socket and converts them to protobuf at its edge. One `Inbox` and one `Outbox` travel per turn.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.contract.adapters import AdapterOrder, AdapterReply
from weft.contract.experts import ExpertCommand, ExpertReply
from weft.contract.faults import FaultSpec, FaultState
from weft.contract.fills import (
    FillCommand,
    FillerEvent,
    FillReply,
    FillStart,
    LeaseAnswer,
    LeaseQuery,
    LeaseReply,
    ProcessExited,
)
from weft.contract.kv_changes import KvChange
from weft.contract.profiles import ProfileCommand, ProfileEnd
from weft.contract.reports import LoadReport
from weft.contract.spans import Media
from weft.contract.store import (
    StoreAnswer,
    StoreHeld,
    StoreHold,
    StoreLookup,
    StorePut,
    StorePutResult,
)
from weft.contract.submits import Cancel, Failure, GatewayBatch, Ping, SessionEnd, Submit
from weft.contract.weights import WeightCommand, WeightReply

# -- to the engine ---------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class FaultOrder:
    """Arms a fault in the engine's process or disarms some; answered by those armed then."""

    query: int
    add: FaultSpec | None = None
    clear: str | None = None
    """Disarms what is armed at this point; empty = everything."""


@dataclass(slots=True, kw_only=True)
class Inbox:
    """All messages received since the last turn; handled kind by kind in this order."""

    media: list[Media] = field(default_factory=list)
    """Processed media, which later submits and handles name. They come first, since those in the
    same inbox may need them."""
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    session_ends: list[SessionEnd] = field(default_factory=list)
    closed_gateways: list[int] = field(default_factory=list)
    pings: list[Ping] = field(default_factory=list)
    fill_starts: list[FillStart] = field(default_factory=list)
    fill_renewals: list[bytes] = field(default_factory=list)
    fill_stops: list[bytes] = field(default_factory=list)
    taken_fill_events: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (stream, number of its events that gRPC has taken), for streams that carry data."""
    broken_fill_streams: list[int] = field(default_factory=list)
    lease_queries: list[LeaseQuery] = field(default_factory=list)
    filler_events: list[FillerEvent] = field(default_factory=list)
    lease_answers: list[LeaseAnswer] = field(default_factory=list)
    exits: list[ProcessExited] = field(default_factory=list)
    store_answers: list[StoreAnswer] = field(default_factory=list)
    store_put_results: list[StorePutResult] = field(default_factory=list)
    store_held: list[StoreHeld] = field(default_factory=list)
    drains: list[bool] = field(default_factory=list)
    """Orders to drain (True: the engine takes no new work and hands waiting requests back; running
    requests continue) and to take work again (False), in their order.
    """
    hand_back: bool = False
    """Hand running requests back too, so that gateways can resume them on other workers."""
    flush_cache: list[int] = field(default_factory=list)
    """Query ids of flush orders."""
    dump_state: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (query, most entries of each list)."""
    adapter_orders: list[AdapterOrder] = field(default_factory=list)
    """Orders about adapters. The engine handles them first, since requests in the same inbox may
    name the adapters."""
    fault_orders: list[FaultOrder] = field(default_factory=list)
    """Orders for the fault points of the engine's process."""
    profile_commands: list[ProfileCommand] = field(default_factory=list)
    weight_commands: list[WeightCommand] = field(default_factory=list)
    expert_commands: list[ExpertCommand] = field(default_factory=list)
    log_level: str = ""
    """New log level of the engine's process: debug, info, warning or error; empty: unchanged."""


# -- from the engine -------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Outbox:
    """Everything that one turn of the engine's loop produced."""

    gateways: list[GatewayBatch] = field(default_factory=list)
    fill_commands: list[FillCommand] = field(default_factory=list)
    fill_replies: list[FillReply] = field(default_factory=list)
    lease_replies: list[LeaseReply] = field(default_factory=list)
    store_lookups: list[StoreLookup] = field(default_factory=list)
    store_puts: list[StorePut] = field(default_factory=list)
    store_holds: list[StoreHold] = field(default_factory=list)
    store_releases: list[int] = field(default_factory=list)
    """Holds whose pages are no longer read."""
    exit_replies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (query, pages released)."""
    kv_changes: list[KvChange] = field(default_factory=list)
    """Changes of the prefix cache."""
    flush_replies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (query, pages flushed)."""
    state_replies: list[tuple[int, str]] = field(default_factory=list)
    """Pairs (query, JSON object)."""
    adapter_replies: list[AdapterReply] = field(default_factory=list)
    fault_replies: list[tuple[int, list[FaultState]]] = field(default_factory=list)
    """Pairs (query, faults armed in the engine's process)."""
    profile_replies: list[tuple[int, Failure | None]] = field(default_factory=list)
    """Pairs (query, why the command was not obeyed)."""
    profile_ends: list[ProfileEnd] = field(default_factory=list)
    weight_replies: list[WeightReply] = field(default_factory=list)
    expert_replies: list[ExpertReply] = field(default_factory=list)
    load: LoadReport | None = None
