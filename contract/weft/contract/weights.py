"""Pauses and changes of a worker's weights: what is asked, and the state that they are in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weft.contract.errors import InvalidRequest
from weft.contract.submits import Failure

PauseMode = Literal["abort", "wait", "keep", "retract"]
"""What becomes of requests: they end as cancelled, or end by themselves, or keep their pages, or
are computed anew when the pause is over. In the first two modes new requests are refused, in the
others they wait.
"""
WeightState = Literal["ready", "updating", "failed"]
"""failed: an update has not ended, so the weights are a mixture, and requests are refused until an
update ends.
"""
WeightAction = Literal["show", "pause", "resume", "refit", "digest"]
DEFAULT_LIMIT_S, MAX_LIMIT_S = 1800.0, 86_400.0
"""Seconds after which a pause ends by itself, unless a further command renews it."""
MAX_VERSION_CHARS = 128
MAX_FOLDER_CHARS = 4096


@dataclass(slots=True, kw_only=True)
class WeightCommand:
    """Raises InvalidRequest for a value out of its range."""

    query: int
    action: WeightAction
    mode: PauseMode = "keep"
    limit_s: float = DEFAULT_LIMIT_S
    folder: str = ""
    """Folder of safetensors files on the worker's host."""
    version: str = ""
    """Name of the new version; empty: the first 16 digits of its digest."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.limit_s <= MAX_LIMIT_S:
            message = f"limit: must be from 1 s to {MAX_LIMIT_S:,.0f} s"
            raise InvalidRequest(message, stage="validate", param="limit")
        if len(self.version) > MAX_VERSION_CHARS:
            message = f"weight_version: at most {MAX_VERSION_CHARS} characters"
            raise InvalidRequest(message, stage="validate", param="weight_version")
        if self.action == "refit" and not 0 < len(self.folder) <= MAX_FOLDER_CHARS:
            message = f"model_path: give a folder, at most {MAX_FOLDER_CHARS} characters"
            raise InvalidRequest(message, stage="validate", param="model_path")


@dataclass(slots=True, kw_only=True)
class WeightStatus:
    state: WeightState
    version: str
    """Name of the version that is served; of a failed one, the last that was."""
    model_digest: bytes
    """32 bytes that name the weights; empty while they are a mixture."""
    pause: str = ""
    """Mode of the present pause; empty: there is none."""
    is_drained: bool = True
    """Whether a pause has come to the point at which no step runs and no request will."""
    problem: str = ""
    """Why the last update failed."""
    num_updates: int = 0
    """Updates that have ended well since the worker's start."""
    packed_digest: bytes = b""
    """32 bytes over the parameters as they lie in memory, if they were asked for."""


@dataclass(slots=True, kw_only=True)
class WeightReply:
    query: int
    status: WeightStatus
    failure: Failure | None = None
