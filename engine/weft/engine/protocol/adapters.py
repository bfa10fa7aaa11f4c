"""Orders about adapters, their answers, and where each adapter is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.engine.protocol.submits import Failure


@dataclass(slots=True, kw_only=True)
class AdapterOrder:
    """Loads or unloads an adapter; answered by one `AdapterReply` in any case.

    A load is answered once the adapter is read, checked and known to fit, or has failed; that of
    one which is there already at once (it changes its name, directory and pin). An unload is
    answered once no request uses the adapter; new ones are refused from the order on. A load that
    comes before that ends the unload, which is answered then. Nothing is known of the digest:
    an unload is answered at once.
    """

    query: int
    action: Literal["load", "unload"]
    digest: bytes
    """Content digest, 32 bytes; what is read must have it."""
    name: str = ""
    """Name for people; the engine does not tell adapters apart by it."""
    directory: str = ""
    """Directory of the adapter, unchanged until it is unloaded: it may be read again."""
    is_pinned: bool = False
    """Whether the adapter stays on the device."""
    is_lenient: bool = False
    """For a load: whether to leave out what the model or this worker cannot apply (the digest
    tells).
    """


@dataclass(slots=True, kw_only=True)
class AdapterReply:
    """Result of an AdapterOrder."""

    query: int
    failure: Failure | None = None
    """The failure; None: the order succeeded."""


AdapterPlace = Literal["loading", "disk", "host", "device", "failed"]


@dataclass(slots=True, kw_only=True)
class AdapterState:
    """State of one adapter from the order to load it until the order to unload it."""

    digest: bytes
    name: str
    state: AdapterPlace
    """Requests may name it on `disk` (it was read, its memory was needed), `host` and `device`, not
    while it is `loading` for the first time, nor if it `failed` to."""
    rank: int = 0
    """The largest; 0 while it is not known."""
    num_bytes: int = 0
    """Bytes of its weights in memory; 0 while unknown."""
    num_requests: int = 0
    """Requests that name it and have not ended."""
    is_pinned: bool = False
    is_unloading: bool = False
    """New requests may not name it; it goes with the last that does."""
    error: str = ""
    """Error message of the state `failed`."""
    left_out: tuple[str, ...] = ()
    """Some of the tensors that a lenient read left out."""
