"""Orders to load and unload adapters, their answers, and the state of each adapter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from weft.contract.submits import Failure
from weft.contract.wire import MAX_MESSAGE_BYTES, wire

_MAX_NAME_BYTES = 256


@dataclass(slots=True, kw_only=True)
class AdapterOrder:
    """Loads or unloads an adapter; the engine answers each order with one `AdapterReply`.

    The engine answers a load when the adapter was read, was checked and fits, or when the load
    has failed. If the adapter is loaded already, the engine changes its name, directory and pin and
    answers at once. The engine answers an unload when no request uses the adapter any more; it
    refuses new requests from the order on. A later load ends an unfinished unload, which is
    answered then. An unload of an unknown digest is answered at once.
    """

    query: int
    action: Literal["load", "unload"]
    digest: bytes
    """Content digest, 32 bytes; the files must have it when they are read."""
    name: str = ""
    """Name for people; the engine does not distinguish adapters by it."""
    directory: str = ""
    """Directory of the adapter. It must not change before the unload: the engine may read it again.
    """
    is_pinned: bool = False
    """Whether the adapter stays on the device."""
    is_lenient: bool = False
    """For a load: whether tensors that the model or this worker cannot apply are ignored. The
    digest depends on this.
    """


@dataclass(slots=True, kw_only=True)
class AdapterReply:
    query: int
    failure: Failure | None = None
    """The failure; None: the order succeeded."""


AdapterPlace = Literal["loading", "disk", "host", "device", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """State of one adapter from the order to load it until the order to unload it."""

    digest: bytes = field(metadata=wire(name="adapter.digest"))
    name: str = field(metadata=wire(name="adapter.name"))
    state: AdapterPlace
    """Requests may name an adapter in the states `disk` (it was read, but lost its memory to
    others), `host` and `device`. They may not while it is `loading` for the first time, nor if the
    load `failed`."""
    rank: int = 0
    """Largest rank of its modules; 0 while unknown."""
    num_bytes: int = field(default=0, metadata=wire(name="weight_bytes"))
    """Bytes of its weights in memory; 0 while unknown."""
    num_requests: int = 0
    """Requests that name it and have not ended."""
    is_pinned: bool = False
    is_unloading: bool = False
    """Whether it is being unloaded: new requests may not name it, and it is removed when the last
    request that names it has ended."""
    error: str = field(default="", metadata=wire(cut_bytes=MAX_MESSAGE_BYTES))
    """Error message of the state `failed`."""
    left_out: tuple[str, ...] = field(default=(), metadata=wire(cut_bytes=_MAX_NAME_BYTES))
    """Some of the tensors that a lenient read did not apply."""
